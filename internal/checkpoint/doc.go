// Package checkpoint keeps portable checkpoints: the files of a workspace as one
// canonical tar, with a signed manifest, in a store from which any extension can
// restore them. docs/checkpoints.md describes the format for other implementations.
//
// A Store works on Blobs, a small interface over a local directory (Dir) or an
// S3-compatible service (package s3). What is put there is never changed; several
// brokers may share one place.
//
//   - Save takes any tar, refuses what is hostile, writes the canonical form and seals
//     it: reads it back, and only if every digest holds makes it a checkpoint. What is
//     not sealed cannot be opened and is not listed.
//   - Open returns the canonical tar and verifies it while it is read.
//   - Drop forgets a checkpoint; GC removes, a grace period later, what nothing needs.
//     A restore that is under way keeps what it reads.
//   - Export and Import move a checkpoint between stores as one file, which is also an
//     ordinary .tar.zst.
//   - Extract unpacks a tar below an os.Root, under the same rules.
//
// The package knows nothing of sandboxes, tenants or extensions; internal/manager calls
// it through an interface of its own.
package checkpoint

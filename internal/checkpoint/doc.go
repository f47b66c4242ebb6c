// Package checkpoint keeps portable checkpoints: the files of a workspace as one
// canonical tar, with a signed manifest, in a store from which any extension can
// restore them. docs/design/checkpoints.md describes the format for other implementations.
//
// A Store works on Blobs, a small interface over a local directory (Dir) or an
// S3-compatible service (package s3). Objects never change; several
// brokers may share one place.
//
//   - Save takes any tar, refuses hostile content, writes the canonical form and seals
//     it: reads it back, and only if every digest matches makes it a checkpoint. An
//     unsealed one cannot be opened and is not listed.
//   - Open returns the canonical tar and verifies it while it is read.
//   - Drop forgets a checkpoint; GC removes unneeded data a grace period later.
//     A restore that is under way keeps what it reads.
//   - Export and Import move a checkpoint between stores as one file, which is also an
//     ordinary .tar.zst.
//
// The package knows nothing of sandboxes, tenants or extensions; internal/manager calls
// it through an interface of its own.
package checkpoint

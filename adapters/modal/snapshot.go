package modal

import (
	"context"
	"encoding/json"
	"iter"
	"strings"
	"time"

	modal "github.com/modal-labs/modal-client/go"
	"google.golang.org/grpc/codes"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosted"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

const (
	keep     = 30 * 24 * time.Hour // Modal keeps a snapshot, which is an image, for this long
	saveTime = 5 * time.Minute     // for saving one
	// notePrefix begins the keys of notes about snapshots. No ID of a sandbox has an underscore.
	notePrefix = "snapshot_"
	metaImage  = "image"
)

// A saved is the note about a snapshot, since an image at Modal has no name or tags of ours.
type saved struct {
	SandboxID  string    `json:"sandbox_id"`
	Generation int       `json:"generation"`
	Image      string    `json:"image,omitempty"` // from the answer
	Expires    time.Time `json:"expires,omitzero"`

	Credential sandboxer.SecretRef `json:"credential,omitzero"` // the key to its account
}

func (s saved) receipt(id string) sandboxer.Snapshot {
	return sandboxer.Snapshot{SnapshotID: id, Meta: map[string]string{metaImage: s.Image}, ExpiresAt: s.Expires, Credential: s.Credential}
}

// recall reads the note about a snapshot. Kind: NotFound if there is none.
func (x *extension) recall(ctx context.Context, key string) (s saved, err error) {
	n, err := x.Env.Notes.Get(ctx, key)
	if err == nil {
		_, err = strictjson.DecodeStored(n.Value, &s)
	}
	return s, err
}

func (x *extension) remember(ctx context.Context, key string, s saved) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return x.Env.Notes.Put(ctx, key, data)
}

// Snapshot implements sandboxer.Snapshotter: it saves all files of the sandbox. If the answer is lost, Modal may have an image that
// nothing names, until it expires.
func (x *extension) Snapshot(ctx context.Context, h sandboxer.Handle, id string) (none sandboxer.Snapshot, err error) {
	if err := ctx.Err(); err != nil {
		return none, err
	}
	key := notePrefix + id
	unlock, err := x.Env.Notes.Lock(ctx, key)
	if err != nil {
		return none, err
	}
	defer unlock()
	s, err := x.recall(ctx, key)
	if err == nil && s.Image != "" {
		return s.receipt(id), nil
	}
	if err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
		return none, err
	}
	o, err := x.Find(ctx, h)
	if err != nil {
		return none, err
	}
	is, _ := x.Handle(o, x.Env.Owner)
	s = saved{SandboxID: is.SandboxID, Generation: is.Generation, Expires: time.Now().Add(keep).UTC().Truncate(time.Second), Credential: is.Credential}
	ctx, leave, err := x.enter(hosted.For(ctx, s.Credential))
	if err != nil {
		return none, err
	}
	defer leave()
	if err := x.remember(ctx, key, s); err != nil {
		return none, err
	}
	img, err := x.sandbox(ctx, o.Ref).SnapshotFilesystem(ctx, &modal.SandboxSnapshotFilesystemParams{Timeout: saveTime, TTL: keep})
	if err != nil {
		if _, gone := x.get(ctx, o.Ref); sandboxer.KindOf(gone) == sandboxer.NotFound {
			return none, gone
		}
		return none, failure(ctx, err)
	}
	s.Image = img.ImageID
	return s.receipt(id), x.remember(ctx, key, s)
}

// RestoreFromSnapshot implements sandboxer.Snapshotter.
func (x *extension) RestoreFromSnapshot(ctx context.Context, spec sandboxer.Spec, s sandboxer.Snapshot) (sandboxer.Handle, error) {
	image := s.Meta[metaImage]
	if image == "" {
		return sandboxer.Handle{}, sandboxer.Untouched(sandboxer.E(sandboxer.NotFound, nil, "snapshot %s names no image at Modal", s.SnapshotID))
	}
	return x.provision(ctx, spec, image)
}

// DropSnapshot implements sandboxer.Snapshotter.
func (x *extension) DropSnapshot(ctx context.Context, s sandboxer.Snapshot) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	key := notePrefix + s.SnapshotID
	unlock, err := x.Env.Notes.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	is, err := x.recall(ctx, key)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	if err == nil && is.Image != "" {
		err = x.removeImage(hosted.For(ctx, is.Credential), is.Image)
	}
	if err != nil {
		return err
	}
	return x.Env.Notes.Delete(ctx, key)
}

// removeImage removes an image from ctx's account, where it need not exist.
func (x *extension) removeImage(ctx context.Context, image string) error {
	ctx, leave, err := x.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	bounded, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	if err := in(ctx).client.Images.Delete(bounded, image, nil); err != nil && codeOf(err) != codes.NotFound {
		return failure(ctx, err)
	}
	return nil
}

// ListSnapshots implements sandboxer.Snapshotter. The notes have them: Modal lists no images.
func (x *extension) ListSnapshots(ctx context.Context, owner string) iter.Seq2[sandboxer.FoundSnapshot, error] {
	return func(yield func(sandboxer.FoundSnapshot, error) bool) {
		if owner != x.Env.Owner {
			return
		}
		keys, err := x.Env.Notes.List(ctx)
		if err != nil {
			yield(sandboxer.FoundSnapshot{}, err)
			return
		}
		for _, key := range keys {
			id, is := strings.CutPrefix(key, notePrefix)
			if !is {
				continue
			}
			s, err := x.recall(ctx, key)
			if sandboxer.KindOf(err) == sandboxer.NotFound { // dropped meanwhile
				continue
			}
			found := sandboxer.FoundSnapshot{Snapshot: sandboxer.Snapshot{SnapshotID: id, Credential: s.Credential}, SandboxID: s.SandboxID, Generation: s.Generation}
			if s.Image != "" {
				found.Snapshot, found.Whole = s.receipt(id), true
			}
			if !yield(found, err) {
				return
			}
		}
	}
}

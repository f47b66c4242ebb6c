// Package s3 keeps the objects of checkpoints in a bucket of an S3-compatible service.
package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/checkpoint"
)

// Config names a bucket.
type Config struct {
	Endpoint  string // "https://s3.example.org"; http for a server on this machine
	Region    string // may be empty
	Bucket    string // must exist
	Prefix    string // of all objects, without '/' at its ends; may be empty
	AccessKey string
	SecretKey sandboxer.Secret
	Token     sandboxer.Secret // of a session; may be empty
}

// partSize is how much of an object of unknown length is held in memory. Objects up to
// this size are put in one request.
const partSize = 16 << 20

// Bucket is a place for objects. The service must honour If-None-Match: * when an
// object is put, as Amazon S3, MinIO and Ceph do; Open tries it.
type Bucket struct {
	c      *minio.Client
	core   minio.Core
	bucket string
	prefix string
}

var _ checkpoint.Blobs = (*Bucket)(nil)

// Open connects to the bucket and makes sure that it never replaces an object. Kinds:
// Invalid for a configuration that makes no sense, Denied, NotFound for a bucket that
// does not exist, Unsupported for a service that ignores conditions, Unavailable.
func Open(ctx context.Context, cfg Config) (*Bucket, error) {
	c, err := newClient(cfg)
	if err != nil {
		return nil, err
	}
	b := &Bucket{c: c, core: minio.Core{Client: c}, bucket: cfg.Bucket}
	if cfg.Prefix != "" {
		b.prefix = cfg.Prefix + "/"
	}
	probe := "probe/" + rand.Text() // our own: others may be opening it too
	if err := b.Put(ctx, probe, strings.NewReader("1")); err != nil {
		return nil, err
	}
	if err := b.Put(ctx, probe, strings.NewReader("1")); sandboxer.KindOf(err) != sandboxer.Conflict {
		if err == nil {
			err = sandboxer.E(sandboxer.Unsupported, nil, "the object store ignores If-None-Match, without which two brokers could overwrite each other").
				WithHint("use a service that supports conditional writes")
		}
		return nil, err
	}
	return b, b.Delete(ctx, probe)
}

func newClient(cfg Config) (*minio.Client, error) {
	u, err := url.Parse(cfg.Endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.Path != "" && u.Path != "/" || u.User != nil {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the endpoint of the object store is no http or https URL without a path")
	}
	if cfg.Bucket == "" || strings.HasPrefix(cfg.Prefix, "/") || strings.HasSuffix(cfg.Prefix, "/") {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "the object store needs a bucket, and a prefix without / at its ends")
	}
	c, err := minio.New(u.Host, &minio.Options{Creds: credentials.NewStaticV4(cfg.AccessKey, string(cfg.SecretKey), string(cfg.Token)),
		Secure: u.Scheme == "https", Region: cfg.Region, Transport: newTransport()})
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "the object store cannot be used as configured")
	}
	return c, nil
}

// failure gives an error of the service its kind.
func failure(ctx context.Context, err error, name string) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var own *sandboxer.Error
	if errors.As(err, &own) {
		return err
	}
	if errors.Is(err, errStalled) {
		return sandboxer.E(sandboxer.Unavailable, err, "the object store did not answer for %s: nothing moved for %s", name, stall).
			WithHint("check the service behind s3_endpoint; try again later")
	}
	r := minio.ToErrorResponse(err)
	switch {
	case r.StatusCode == http.StatusPreconditionFailed, r.Code == "PreconditionFailed", r.Code == "ConditionalRequestConflict":
		return sandboxer.E(sandboxer.Conflict, err, "the object %s is there already", name)
	case r.Code == "NoSuchKey", r.Code == "NoSuchBucket", r.StatusCode == http.StatusNotFound:
		return sandboxer.E(sandboxer.NotFound, err, "the object %s or its bucket is not there", name)
	case r.StatusCode == http.StatusForbidden, r.StatusCode == http.StatusUnauthorized:
		return sandboxer.E(sandboxer.Denied, err, "the object store refuses access to %s", name).WithHint("check its credentials and the policy of the bucket")
	case r.Code == "XMinioStorageFull", r.Code == "QuotaExceeded", r.StatusCode == http.StatusInsufficientStorage:
		return sandboxer.E(sandboxer.Exhausted, err, "the object store has no room for %s", name)
	}
	return sandboxer.E(sandboxer.Unavailable, err, "the object store did not answer properly for %s", name).WithHint("try again later")
}

// source remembers an error of the caller's reader, which must be returned unchanged.
type source struct {
	r   io.Reader
	err error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// Put implements checkpoint.Blobs.
func (b *Bucket) Put(ctx context.Context, name string, r io.Reader) error {
	ctx = bounded(ctx)
	src := &source{r: r}
	first := make([]byte, partSize)
	n, err := io.ReadFull(src, first)
	if src.err != nil {
		return src.err
	}
	key := b.prefix + name
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		var o minio.PutObjectOptions
		o.SetMatchETagExcept("*")
		o.DisableMultipart = true
		_, err = b.c.PutObject(ctx, b.bucket, key, bytes.NewReader(first[:n]), int64(n), o)
		return failure(ctx, err, name)
	}
	// More than a part: nothing is visible before the upload is completed.
	if _, err := b.Stat(ctx, name); sandboxer.KindOf(err) != sandboxer.NotFound {
		if err == nil {
			err = sandboxer.E(sandboxer.Conflict, nil, "the object %s is there already", name)
		}
		return err
	}
	upload, err := b.core.NewMultipartUpload(ctx, b.bucket, key, minio.PutObjectOptions{})
	if err != nil {
		return failure(ctx, err, name)
	}
	err = b.parts(ctx, key, upload, first, n, src)
	if err != nil {
		late, stop := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		_ = b.core.AbortMultipartUpload(late, b.bucket, key, upload) // otherwise Tidy does it
		stop()
	}
	if src.err != nil {
		return src.err
	}
	return failure(ctx, err, name)
}

func (b *Bucket) parts(ctx context.Context, key, upload string, buf []byte, n int, src io.Reader) error {
	var done []minio.CompletePart
	for n > 0 {
		// The digest is known: no need for the chunked signing that not every service decodes.
		sum := sha256.Sum256(buf[:n])
		p, err := b.core.PutObjectPart(ctx, b.bucket, key, upload, len(done)+1, bytes.NewReader(buf[:n]), int64(n),
			minio.PutObjectPartOptions{Sha256Hex: hex.EncodeToString(sum[:]), DisableContentSha256: true})
		if err != nil {
			return err
		}
		done = append(done, minio.CompletePart{PartNumber: p.PartNumber, ETag: p.ETag})
		if n, err = io.ReadFull(src, buf); err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
			return err
		}
	}
	var o minio.PutObjectOptions
	o.SetMatchETagExcept("*")
	_, err := b.core.CompleteMultipartUpload(ctx, b.bucket, key, upload, done, o)
	return err
}

// Get implements checkpoint.Blobs.
func (b *Bucket) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	ctx = bounded(ctx)
	var o minio.GetObjectOptions
	if n == 0 {
		return io.NopCloser(strings.NewReader("")), nil
	}
	if off > 0 || n > 0 {
		end := int64(0) // to the end
		if n > 0 {
			end = off + n - 1
		}
		if err := o.SetRange(off, end); err != nil {
			return nil, sandboxer.E(sandboxer.Internal, err, "a range of %s makes no sense", name)
		}
	}
	r, _, _, err := b.core.GetObject(ctx, b.bucket, b.prefix+name, o)
	if err != nil {
		return nil, failure(ctx, err, name)
	}
	return body{ctx, r, name}, nil
}

type body struct {
	ctx context.Context
	io.ReadCloser
	name string
}

func (b body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		err = failure(b.ctx, err, b.name)
	}
	return n, err
}

// Stat implements checkpoint.Blobs.
func (b *Bucket) Stat(ctx context.Context, name string) (checkpoint.Blob, error) {
	ctx = bounded(ctx)
	o, err := b.c.StatObject(ctx, b.bucket, b.prefix+name, minio.StatObjectOptions{})
	return checkpoint.Blob{Name: name, Size: o.Size, Time: o.LastModified}, failure(ctx, err, name)
}

// List implements checkpoint.Blobs.
func (b *Bucket) List(ctx context.Context, prefix string) ([]checkpoint.Blob, error) {
	ctx = bounded(ctx)
	ctx, stop := context.WithCancel(ctx) // ends the lister's goroutine
	defer stop()
	var list []checkpoint.Blob
	for o := range b.c.ListObjects(ctx, b.bucket, minio.ListObjectsOptions{Prefix: b.prefix + prefix, Recursive: true}) {
		if o.Err != nil {
			return nil, failure(ctx, o.Err, prefix)
		}
		list = append(list, checkpoint.Blob{Name: strings.TrimPrefix(o.Key, b.prefix), Size: o.Size, Time: o.LastModified})
	}
	return list, ctx.Err()
}

// Delete implements checkpoint.Blobs.
func (b *Bucket) Delete(ctx context.Context, name string) error {
	ctx = bounded(ctx)
	err := failure(ctx, b.c.RemoveObject(ctx, b.bucket, b.prefix+name, minio.RemoveObjectOptions{}), name)
	if sandboxer.KindOf(err) == sandboxer.NotFound {
		return nil
	}
	return err
}

// Tidy implements checkpoint.Blobs.
func (b *Bucket) Tidy(ctx context.Context, before time.Time) error {
	ctx = bounded(ctx)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for u := range b.c.ListIncompleteUploads(ctx, b.bucket, b.prefix, true) {
		if u.Err != nil {
			return failure(ctx, u.Err, b.prefix)
		}
		if u.Initiated.Before(before) {
			if err := b.core.AbortMultipartUpload(ctx, b.bucket, u.Key, u.UploadID); err != nil && minio.ToErrorResponse(err).Code != "NoSuchUpload" {
				return failure(ctx, err, u.Key)
			}
		}
	}
	return ctx.Err()
}

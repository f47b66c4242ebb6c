package remote

import (
	"cmp"
	"context"
	"io"
	"io/fs"
	"iter"
	"net"
	"net/url"
	"path"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// done is use for calls that return only an error.
func done(ctx context.Context, p *peer, h sandboxer.Handle, f func(ref string) error) error {
	_, err := use(ctx, p, h, func(ref string) (struct{}, error) { return struct{}{}, f(ref) })
	return err
}

// Exec implements sandboxer.Execer.
func (p *peer) Exec(ctx context.Context, h sandboxer.Handle, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	return use(ctx, p, h, func(ref string) (sandboxer.Exit, error) { return p.client.Exec(ctx, ref, cmd) })
}

// ReadFile implements sandboxer.Filer.
func (p *peer) ReadFile(ctx context.Context, h sandboxer.Handle, name string) (io.ReadCloser, error) {
	return use(ctx, p, h, func(ref string) (io.ReadCloser, error) { return p.client.ReadFile(ctx, ref, name) })
}

// WriteFile implements sandboxer.Filer.
func (p *peer) WriteFile(ctx context.Context, h sandboxer.Handle, name string, mode fs.FileMode, r io.Reader) error {
	return done(ctx, p, h, func(ref string) error { return p.client.WriteFile(ctx, ref, name, mode, r) })
}

// StatFile implements sandboxer.Filer.
func (p *peer) StatFile(ctx context.Context, h sandboxer.Handle, name string) (sandboxer.FileInfo, error) {
	return use(ctx, p, h, func(ref string) (sandboxer.FileInfo, error) {
		fi, err := p.client.StatFile(ctx, ref, name)
		if err != nil {
			return sandboxer.FileInfo{}, err
		}
		return fileInfo(*fi), nil
	})
}

func fileInfo(fi api.FileInfo) sandboxer.FileInfo {
	target := fi.Target
	if len(fi.TargetBase64) > 0 {
		target = string(fi.TargetBase64)
	}
	return sandboxer.FileInfo{Path: fi.Name(), Size: fi.Size, Mode: fi.FileMode(), ModTime: fi.ModTime, Owner: fi.Owner, Group: fi.Group, Target: target}
}

// ListFiles implements sandboxer.Filer. The API's cursor belongs to its server, so that entries up to after are
// skipped here.
func (p *peer) ListFiles(ctx context.Context, h sandboxer.Handle, dir, after string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) {
		more := true
		err := done(ctx, p, h, func(ref string) error {
			for fi, err := range p.client.ListFiles(ctx, ref, dir) {
				if err != nil {
					return err
				}
				if path.Base(fi.Name()) <= after {
					continue
				}
				if more = yield(fileInfo(fi), nil); !more {
					return nil
				}
			}
			return nil
		})
		if err != nil && more {
			yield(sandboxer.FileInfo{}, err)
		}
	}
}

// MakeDir implements sandboxer.Filer.
func (p *peer) MakeDir(ctx context.Context, h sandboxer.Handle, dir string) error {
	return done(ctx, p, h, func(ref string) error { return p.client.MakeDir(ctx, ref, dir) })
}

// MoveFile implements sandboxer.Filer.
func (p *peer) MoveFile(ctx context.Context, h sandboxer.Handle, from, to string) error {
	return done(ctx, p, h, func(ref string) error { return p.client.MoveFile(ctx, ref, from, to) })
}

// RemoveFile implements sandboxer.Filer.
func (p *peer) RemoveFile(ctx context.Context, h sandboxer.Handle, name string) error {
	return done(ctx, p, h, func(ref string) error { return p.client.RemoveFile(ctx, ref, name) })
}

// Dial implements sandboxer.Dialer.
func (p *peer) Dial(ctx context.Context, h sandboxer.Handle, port int) (net.Conn, error) {
	return use(ctx, p, h, func(ref string) (net.Conn, error) { return p.client.Dial(ctx, ref, port) })
}

// DialURL implements sandboxer.URLDialer. The URL comes from the other installation, so it may lead to the public internet
// only.
func (p *peer) DialURL(ctx context.Context, h sandboxer.Handle) (net.Conn, error) {
	sb, err := p.running(ctx, h)
	if err != nil {
		return nil, err
	}
	return p.connect(ctx, sb.Reachability.URL)
}

func (p *peer) connect(ctx context.Context, text string) (net.Conn, error) {
	u, err := url.Parse(text)
	if err == nil {
		u, err = parseURL(u.Scheme + "://" + u.Host) // the caller adds the rest
	}
	if err != nil {
		return nil, sandboxer.E(sandboxer.Unavailable, err, "%s returned an invalid URL of the sandbox", p.name)
	}
	c, err := connect(ctx, p.urls, u)
	if sandboxer.KindOf(err) == sandboxer.Denied {
		err = sandboxer.E(sandboxer.Denied, err, "%s returned a URL of the sandbox whose address is not public", p.name).
			WithHint("connect to a port of the sandbox")
	}
	return c, err
}

// Stats implements sandboxer.StatsReader.
func (p *peer) Stats(ctx context.Context, h sandboxer.Handle) (sandboxer.Stats, error) {
	return use(ctx, p, h, func(ref string) (sandboxer.Stats, error) {
		s, err := p.client.Stats(ctx, ref)
		if err != nil {
			return sandboxer.Stats{}, err
		}
		return sandboxer.Stats{At: s.At, CPU: s.CPU.Std(), MemoryBytes: s.MemoryBytes, MemoryLimit: s.MemoryLimit, DiskBytes: s.DiskBytes,
			DiskLimit: s.DiskLimit, PIDs: s.PIDs, RxBytes: s.RxBytes, TxBytes: s.TxBytes}, nil
	})
}

// SetNetwork implements sandboxer.Networker.
func (p *peer) SetNetwork(ctx context.Context, h sandboxer.Handle, n sandboxer.NetworkPolicy) error {
	_, err := use(ctx, p, h, func(ref string) (*api.Sandbox, error) { return p.client.SetNetwork(ctx, ref, n) })
	return err
}

// Pause implements sandboxer.Pauser.
func (p *peer) Pause(ctx context.Context, h sandboxer.Handle) error {
	sb, err := p.running(ctx, h)
	if err != nil || sb.State == sandboxer.Paused {
		return err
	}
	_, err = use(ctx, p, h, func(ref string) (*api.Sandbox, error) {
		return p.client.Pause(ctx, ref, api.PauseSandbox{Depth: sandboxer.PauseFreeze})
	})
	return err
}

// Resume implements sandboxer.Pauser.
func (p *peer) Resume(ctx context.Context, h sandboxer.Handle) error {
	sb, err := p.running(ctx, h)
	if err != nil || sb.State == sandboxer.Running {
		return err
	}
	// There, a sandbox has a deadline of its own, which does not run during a pause. Ours was moved meanwhile: to when that
	// pause would end.
	var resume api.ResumeSandbox
	longest := sandboxer.DefaultMaxPaused
	switch prof, err := p.client.Profile(ctx, sb.Profile); {
	case err == nil:
		longest = cmp.Or(time.Duration(prof.MaxPaused), longest)
	case sandboxer.KindOf(err) != sandboxer.NotFound:
		return p.fail(err)
	}
	if sb.Pause != nil && sb.ExpiresAt.Before(sb.Pause.At.Add(longest)) {
		resume.TTL = ttlUntil(sb.ExpiresAt)
	}
	_, err = use(ctx, p, h, func(ref string) (*api.Sandbox, error) {
		return p.client.Resume(ctx, ref, resume)
	})
	return err
}

// running is find without sandboxes that have ended.
func (p *peer) running(ctx context.Context, h sandboxer.Handle) (*api.Sandbox, error) {
	sb, err := p.find(ctx, h)
	if err == nil && ended(sb) {
		err = p.gone(sb)
	}
	return sb, err
}

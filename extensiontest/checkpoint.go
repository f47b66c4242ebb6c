package extensiontest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"path"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/backend"
)

// checkpoint specifies the content of portable snapshots where an archive of the
// workspace is not enough.
func (s *suite) checkpoint(t *testing.T) {
	if !s.opened.Can(sandboxer.CanExec) {
		t.Skip("cannot look inside: the extension has no exec")
	}
	saved := func(t *testing.T, sb *sandbox) (c sandboxer.Contents, archive []byte) {
		t.Helper()
		var out bytes.Buffer
		begun := 0
		err := sb.b.Checkpoint(ctx(t), sb.h, func(said sandboxer.Contents) io.Writer {
			c = said
			begun++
			return &out
		})
		if err != nil {
			t.Fatalf("Checkpoint: %s", describe(err))
		}
		if begun != 1 {
			t.Errorf("Checkpoint said %d times what it would write", begun)
		}
		if held := s.Volume != ""; held != (len(c.Volumes) == 1) {
			t.Errorf("the checkpoint holds the volumes %q", c.Volumes)
		}
		return c, out.Bytes()
	}
	from := func(t *testing.T, b *backend.Backend, sp sandboxer.Spec, c sandboxer.Contents, r io.Reader) *sandbox {
		t.Helper()
		h, err := b.ProvisionFrom(ctx(t), sp, c, r)
		if err != nil {
			t.Fatalf("ProvisionFrom: %s", describe(err))
		}
		reach, err := b.WaitReady(ctx(t), h)
		if err != nil {
			t.Fatalf("WaitReady: %s", describe(err))
		}
		return &sandbox{s: s, b: b, h: h, reach: reach, spec: sp}
	}

	s.test(t, "round trip", func(t *testing.T) {
		sb := s.up(t)
		sb.sh(t, fill, "tree")
		const inVolume = `cd "$1" || exit; echo data >data && chmod 600 data && mkdir -p sub && chmod 711 sub && [ "$(id -u)" != 0 ] || chown -R 1234:567 .`
		const lookIntoVolume = `cd "$1" || exit; find . -exec stat -c '%n %a %u %g' {} + | LC_ALL=C sort; cat data`
		want, volume := sb.sh(t, look, "tree"), ""
		if s.Volume != "" {
			sb.sh(t, inVolume, s.Volume)
			volume = sb.sh(t, lookIntoVolume, s.Volume)
		}
		c, archive := saved(t, sb)
		for r := tar.NewReader(bytes.NewReader(archive)); ; {
			hdr, err := r.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			name := path.Clean(hdr.Name)
			if path.IsAbs(name) || strings.HasPrefix(name, "..") {
				t.Errorf("the checkpoint has the name %q", hdr.Name)
			}
			if s.Volume == "" && strings.HasPrefix(name, sandboxer.VolumesDir) {
				t.Errorf("the checkpoint has %q and no volumes", hdr.Name)
			}
		}
		sb.sh(t, "echo later >tree/plain")
		sb.alive(t)

		// On another process of the broker, with a name and an environment of its own.
		b := s.open(t)
		sp := s.spec()
		sp.Env["SANDBOXER_TEST"] = "mine"
		s.owe(t, b, sp)
		other := from(t, b, sp, c, bytes.NewReader(archive))
		if got := other.sh(t, look, "tree"); got != want {
			t.Errorf("the workspace is\n%s\nwant\n%s", got, want)
		}
		if s.Volume != "" {
			if got := other.sh(t, lookIntoVolume, s.Volume); got != volume {
				t.Errorf("the volume holds\n%s\nwant\n%s", got, volume)
			}
		}
		if got := other.sh(t, `[ ! -e "$1" ] && echo "$SANDBOXER_TEST"`, sandboxer.VolumesDir); got != "mine" {
			t.Errorf("the environment says %q", got)
		}
		other.sh(t, "cd tree && ./tool >ran && echo more >>private && rmdir empty && echo later >plain")
		other.alive(t)

		// Once it exists it is only found.
		if h, err := b.ProvisionFrom(ctx(t), sp, c, failingReader{}); err == nil {
			if h.Ref != other.h.Ref {
				t.Errorf("the second time it is %q, not %q", h.Ref, other.h.Ref)
			}
		} else if k := sandboxer.KindOf(err); k != sandboxer.Invalid {
			t.Errorf("once more: %s", describe(err))
		}
		again := from(t, b, sp, c, bytes.NewReader(archive))
		if got := again.sh(t, "cat tree/plain"); got != "later" {
			t.Errorf("asked for once more, the workspace was filled once more: plain says %q", got)
		}
		if s.Volume == "" {
			return
		}
		_, err := b.ProvisionFrom(ctx(t), s.spec(), sandboxer.Contents{Volumes: []string{"no-such-volume"}}, bytes.NewReader(archive))
		wantKind(t, err, "a volume that the sandbox has not", sandboxer.Unsupported)
	})
	s.test(t, "of an archive", func(t *testing.T) {
		var in bytes.Buffer
		w := tar.NewWriter(&in)
		noise := noise(1 << 20)
		err := errors.Join(
			w.WriteHeader(&tar.Header{Name: "sub/", Typeflag: tar.TypeDir, Mode: 0o755}),
			w.WriteHeader(&tar.Header{Name: "sub/noise", Mode: 0o640, Size: int64(len(noise))}), second(w.Write(noise)),
			w.WriteHeader(&tar.Header{Name: "the last", Mode: 0o755, Size: 5}), second(w.Write([]byte("last\n"))), w.Close())
		if err != nil {
			t.Fatal(err)
		}
		b := s.opened
		sp := s.spec()
		s.owe(t, b, sp)
		// A failure midway leaves nothing that could be taken for a whole one.
		cut := io.MultiReader(bytes.NewReader(in.Bytes()[:in.Len()/2]), failingReader{})
		if _, err := b.ProvisionFrom(ctx(t), sp, sandboxer.Contents{}, cut); err == nil {
			t.Error("a source that failed midway was taken for a whole one")
		}
		wantKind(t, second(b.ProvisionFrom(ctx(t), sp, sandboxer.Contents{}, bytes.NewReader(bytes.Repeat([]byte("no tar at all "), 1000)))), "noise", sandboxer.Invalid)
		sb := from(t, b, sp, sandboxer.Contents{}, &in)
		if got := sb.sh(t, `find . ! -name . ! -type d | LC_ALL=C sort; cat "the last"; wc -c <sub/noise`); got != "./sub/noise\n./the last\nlast\n1048576" {
			t.Errorf("the workspace has %q", got)
		}
		sb.alive(t)
	})
	s.test(t, "of one moment", func(t *testing.T) {
		sb := s.up(t)
		// Growing numbers, written in another order than a reader visits them, with
		// a file between them that takes a while to read.
		const write = `head -c 16000000 /dev/zero >b; i=0
while [ $i -lt 100000000 ]; do i=$((i+1)); echo $i >>d; echo $i >>c; echo $i >>a; done`
		ctx, stop := context.WithCancel(ctx(t))
		ended := make(chan error, 1)
		go func() {
			_, err := sb.b.Exec(ctx, sb.h, sandboxer.Cmd{Args: s.script(write)})
			ended <- err
		}()
		defer func() { stop(); <-ended }()
		poll(t, "the first number", s.long(), func() bool { return sb.sh(t, "cat a 2>/dev/null | head -n 1") != "" })
		// First one without a reader: the sandbox goes on.
		err := sb.b.Checkpoint(ctx, sb.h, func(sandboxer.Contents) io.Writer {
			return writerFunc(func([]byte) (int, error) { return 0, errors.New("the reader left") })
		})
		if err == nil {
			t.Error("the checkpoint succeeded although its writer failed")
		}
		goesOn := func() {
			t.Helper()
			had := sb.sh(t, "wc -c <a")
			poll(t, "the next number", s.long(), func() bool { return sb.sh(t, "wc -c <a") != had })
		}
		goesOn()
		c, archive := saved(t, sb)
		goesOn()
		if !c.Quiesced {
			t.Skip("the checkpoint is crash-consistent, and says so")
		}
		said := map[string]int{}
		for r := tar.NewReader(bytes.NewReader(archive)); ; {
			hdr, err := r.Next()
			if err != nil {
				break
			}
			if name := path.Clean(hdr.Name); name == "a" || name == "c" || name == "d" {
				data, _ := io.ReadAll(r)
				said[name] = strings.Count(string(data), "\n")
			}
		}
		if a, d := said["a"], said["d"]; a == 0 || d != a && d != a+1 {
			t.Errorf("the writer was at %d in a, %d in c and %d in d: they are not of one moment", a, said["c"], d)
		}
	})
	s.test(t, "of what is paused", func(t *testing.T) {
		sb := s.up(t)
		if !sb.b.Can(sandboxer.CanPause) {
			t.Skip("the extension has no pause")
		}
		sb.sh(t, "echo kept >f")
		if err := sb.b.Pause(ctx(t), sb.h); err != nil {
			t.Fatalf("Pause: %s", describe(err))
		}
		c, archive := saved(t, sb)
		_, err := sb.b.Exec(ctx(t), sb.h, sandboxer.Cmd{Args: s.script("true")})
		wantKind(t, err, "a command in what was paused before the checkpoint", sandboxer.Conflict)
		if err := sb.b.Resume(ctx(t), sb.h); err != nil {
			t.Fatalf("Resume: %s", describe(err))
		}
		sb.alive(t)
		sp := s.spec()
		s.owe(t, sb.b, sp)
		if got := from(t, sb.b, sp, c, bytes.NewReader(archive)).sh(t, "cat f"); got != "kept" {
			t.Errorf("the file says %q", got)
		}
	})
	s.test(t, "unknown sandbox", func(t *testing.T) {
		err := s.opened.Checkpoint(ctx(t), s.unknown(), func(sandboxer.Contents) io.Writer { return io.Discard })
		wantKind(t, err, "Checkpoint", sandboxer.NotFound)
	})
}

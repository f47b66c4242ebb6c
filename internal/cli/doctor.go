package cli

import (
	"bytes"
	"context"
	"database/sql"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

type doctorOptions struct {
	f       *factory
	profile string
}

func newCmdDoctor(f *factory) *cobra.Command {
	o := &doctorOptions{f: f}
	c := &cobra.Command{
		Use: "doctor", Short: "Check this machine, and boot a real sandbox as a test",
		Long: "Check everything that sandboxes on this machine need, and boot, use and destroy one. Exits with 10 when a check\n" +
			"fails. This changes nothing. The output of -o json is for bug reports and has no secrets.",
		Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return doctorRun(cmd.Context(), o)
		},
	}
	c.Flags().StringVar(&o.profile, "profile", "", "`PROFILE` of the test sandbox (SANDBOXER_PROFILE)")
	_ = c.RegisterFlagCompletionFunc("profile", f.completeProfiles)
	return c
}

// A check is one line of the doctor's report.
type check struct {
	Name     string `json:"name"`
	Status   string `json:"status"` // ok, warn or fail
	Evidence string `json:"evidence"`
	Fix      string `json:"fix,omitempty"`
}

const (
	ok   = "ok"
	warn = "warn"
	fail = "fail"
)

type checkup struct {
	o      *doctorOptions
	checks []check
}

func (c *checkup) add(name, status, fix, format string, args ...any) {
	c.checks = append(c.checks, check{name, status, fmt.Sprintf(format, args...), fix})
}

// failed adds a failed check, with err's message.
func (c *checkup) failed(name, status string, err error) {
	c.add(name, status, sandboxer.HintOf(err), "%s", sentence(err))
}

func doctorRun(ctx context.Context, o *doctorOptions) error {
	s, err := o.f.settings()
	if err != nil {
		return err
	}
	if o.profile == "" {
		o.profile = s.get("profile")
	}
	p := o.f.progress()
	defer p.stop()
	c := &checkup{o: o}
	c.kernel()
	c.namespaces()
	c.cgroups()
	c.helpers()
	c.dataDir(s.get("data_dir"))
	c.sqlite(ctx)
	c.catalogue()
	c.broker(ctx, p)
	p.stop()

	l := &api.List[check]{SchemaVersion: api.SchemaVersion, Items: c.checks}
	var failures, warnings int
	for _, x := range c.checks {
		switch x.Status {
		case fail:
			failures++
		case warn:
			warnings++
		}
	}
	if format := o.f.format(); format == "table" || format == "wide" {
		paint := o.f.io.paint
		if !o.f.io.outTTY {
			paint = func(_, s string) string { return s }
		}
		for _, x := range c.checks {
			sgr := map[string]string{ok: "32", warn: "33", fail: "31"}[x.Status]
			fmt.Fprintf(o.f.io.out, "%s %-16s %s\n", paint(sgr, fmt.Sprintf("%-4s", x.Status)), x.Name, indented(cleanLines(x.Evidence)))
			if x.Fix != "" && x.Status != ok {
				fmt.Fprintf(o.f.io.out, "     %-16s fix: %s\n", "", indented(cleanLines(x.Fix)))
			}
		}
		fmt.Fprintf(o.f.io.out, "%d checks, %d warnings, %d failures\n", len(c.checks), warnings, failures)
	} else if err := printList(o.f, l, view[check]{name: func(x check) string { return x.Name }}); err != nil {
		return err
	}
	if failures > 0 {
		return &exitError{exitFindings, nil}
	}
	return nil
}

func indented(s string) string { return strings.ReplaceAll(s, "\n", "\n"+strings.Repeat(" ", 22)) }

func (c *checkup) kernel() {
	var u unix.Utsname
	release := "unknown"
	if unix.Uname(&u) == nil {
		release = unix.ByteSliceToString(u.Release[:])
	}
	status, fix := ok, ""
	if runtime.GOOS != "linux" || runtime.GOARCH != "amd64" && runtime.GOARCH != "arm64" {
		status, fix = warn, "sandboxes on this machine itself need Linux on amd64 or arm64; use a server on such a machine with --url"
	}
	c.add("kernel", status, fix, "%s %s %s, user ID %d", runtime.GOOS, release, runtime.GOARCH, os.Geteuid())
}

// number reads a kernel setting; ok is false where the kernel has none.
func number(name string) (n int64, ok bool) {
	b, err := os.ReadFile(name)
	if err != nil {
		return 0, false
	}
	_, err = fmt.Sscan(string(b), &n)
	return n, err == nil
}

func (c *checkup) namespaces() {
	if runtime.GOOS != "linux" {
		return
	}
	const name = "user namespaces"
	most, known := number("/proc/sys/user/max_user_namespaces")
	clone, cloneKnown := number("/proc/sys/kernel/unprivileged_userns_clone")
	armor, _ := number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
	root := os.Geteuid() == 0
	switch {
	case known && most == 0:
		c.add(name, fail, "allow them: sysctl -w user.max_user_namespaces=15000", "the kernel allows none")
	case !root && cloneKnown && clone == 0:
		c.add(name, fail, "allow them: sysctl -w kernel.unprivileged_userns_clone=1", "ordinary users may not make any")
	case !root && armor == 1:
		c.add(name, fail, "allow them: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or give sandboxer an AppArmor profile", "AppArmor keeps them from ordinary users")
	case !known:
		c.add(name, warn, "use a kernel with CONFIG_USER_NS", "the kernel does not say whether it has any")
	case root:
		c.add(name, ok, "", "up to %d; this is root", most)
	default:
		c.add(name, ok, "", "up to %d, also for ordinary users", most)
	}
}

func (c *checkup) cgroups() {
	if runtime.GOOS != "linux" {
		return
	}
	const name, fix = "control groups", "run as root, or let systemd delegate the controllers to your session: Delegate=yes"
	if b, err := os.ReadFile("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		have := strings.Fields(string(b))
		if unix.Access("/sys/fs/cgroup/cgroup.subtree_control", unix.W_OK) != nil {
			own := "the group of this process"
			c.add(name, warn, fix, "version 2 with %s; not writable at the top, limits depend on %s", strings.Join(have, ", "), own)
			return
		}
		c.add(name, ok, "", "version 2 with %s", strings.Join(have, ", "))
		return
	}
	var have, missing []string
	for _, ctl := range []string{"cpu", "memory", "pids"} {
		dir := filepath.Join("/sys/fs/cgroup", ctl)
		if st, err := os.Stat(dir); err != nil || !st.IsDir() || unix.Access(dir, unix.W_OK) != nil {
			missing = append(missing, ctl)
			continue
		}
		have = append(have, ctl)
	}
	if len(missing) > 0 {
		c.add(name, warn, fix, "version 1; writable: %s; not: %s. Limits that need the latter are refused", orNone(have), strings.Join(missing, ", "))
		return
	}
	c.add(name, ok, "", "version 1 with %s", strings.Join(have, ", "))
}

func orNone(words []string) string {
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, ", ")
}

// helpers checks the programs that start sandboxes on this machine.
func (c *checkup) helpers() {
	if !slices.ContainsFunc(c.o.f.adapters, func(a sandboxer.Adapter) bool { return a.Kind == "local" }) {
		return
	}
	self, err := os.Executable()
	if err != nil {
		c.add("helper programs", warn, "", "the path of this program is unknown")
		return
	}
	var missing []string
	for _, h := range []string{"sandboxer-agent", "sandboxer-runner"} {
		program := filepath.Join(filepath.Dir(self), h)
		if _, err := os.Stat(program); err != nil {
			missing = append(missing, h)
			program = self
		}
		// They run where there is no system around them.
		if interp := interpreter(program); interp != "" {
			c.add("helper programs", fail, "build all of it again with CGO_ENABLED=0", "%s is linked dynamically (it needs %s) and cannot start inside a sandbox", program, interp)
			return
		}
	}
	if len(missing) > 0 {
		c.add("helper programs", warn, "put them next to "+self+": go install ./cmd/...",
			"%s: missing; this program does their work, and sandboxes start slower", strings.Join(missing, ", "))
		return
	}
	c.add("helper programs", ok, "", "next to %s", self)
}

// interpreter returns the dynamic linker that a program needs, or "".
func interpreter(name string) string {
	f, err := elf.Open(name)
	if err != nil {
		return ""
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			b, err := io.ReadAll(io.LimitReader(p.Open(), 4096))
			if err == nil {
				return strings.TrimRight(string(b), "\x00")
			}
		}
	}
	return ""
}

// dataDir checks the directory, or the place where it would be made.
func (c *checkup) dataDir(dir string) {
	const name = "data directory"
	exists := dir
	for {
		if st, err := os.Stat(exists); err == nil {
			if !st.IsDir() {
				c.add(name, fail, "choose another with --data-dir", "%s is not a directory", exists)
				return
			}
			break
		} else if !errors.Is(err, fs.ErrNotExist) {
			c.add(name, fail, "choose another with --data-dir", "%s cannot be inspected: %v", exists, errors.Unwrap(err))
			return
		}
		exists = filepath.Dir(exists)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(exists, &st); err != nil {
		c.add(name, fail, "", "%s: %v", exists, err)
		return
	}
	free := int64(st.Bavail) * int64(st.Bsize)
	sync, err := syncTime(exists)
	if err != nil {
		c.add(name, fail, "choose another with --data-dir, or become its owner", "%s cannot be written to: %v", exists, err)
		return
	}
	note := ""
	if exists != dir {
		note = " (to be made)"
	}
	status, fix := ok, ""
	switch {
	case free < 1<<30:
		status, fix = warn, "free some space, or choose another directory with --data-dir"
	case sync > 100*time.Millisecond:
		status, fix = warn, "choose a directory on a faster disk with --data-dir: every create waits for it"
	}
	c.add(name, status, fix, "%s%s, %s free, a flush takes %s", dir, note, size(free), sync.Round(10*time.Microsecond))
}

// syncTime is the median of a few flushes of a small file to the disk.
func syncTime(dir string) (time.Duration, error) {
	f, err := os.CreateTemp(dir, ".sandboxer-doctor-*")
	if err != nil {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			err = pe.Err
		}
		return 0, err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	var took []time.Duration
	for range 5 {
		begin := time.Now()
		if _, err := f.Write(bytes.Repeat([]byte{1}, 4096)); err != nil {
			return 0, err
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
		took = append(took, time.Since(begin))
	}
	best := took[0]
	for _, t := range took {
		best = min(best, t)
	}
	return best, nil
}

func (c *checkup) sqlite(ctx context.Context) {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		c.add("sqlite", fail, "", "%v", err)
		return
	}
	defer db.Close()
	var v string
	if err := db.QueryRowContext(ctx, "SELECT sqlite_version()").Scan(&v); err != nil {
		c.add("sqlite", fail, "", "%v", err)
		return
	}
	c.add("sqlite", ok, "", "version %s, linked in", v)
}

func (c *checkup) catalogue() {
	layers, err := c.o.f.layers()
	if err != nil {
		c.failed("catalogue", fail, err)
		return
	}
	cat, err := c.o.f.catalog()
	if err != nil {
		c.add("catalogue", fail, "correct the files and check them: sandboxer profile validate", "%s", err)
		return
	}
	var names []string
	for _, l := range layers {
		name := l.Name
		if l.Root != "" {
			name = l.Root
		}
		names = append(names, name)
	}
	c.add("catalogue", ok, "", "%d extensions, %d profiles from %s", len(cat.Extensions), len(cat.Profiles), strings.Join(names, ", "))
	if old := cat.StalePrices(time.Now()); len(old) > 0 {
		c.add("prices", warn, "look prices up again, and write them to prices.yaml next to config.yaml", "%s", stalePrices(old))
	}
}

// stalePrices says which prices that an extension quotes by are old.
func stalePrices(old []string) string {
	return "these rows of the price book are older than 90 days: " + strings.Join(old, ", ")
}

// broker checks what only a working broker knows: the server's if one runs,
// otherwise one in this process.
func (c *checkup) broker(ctx context.Context, p *progress) {
	s, err := c.o.f.connectOrEmbed(ctx, p)
	if err != nil {
		c.failed("broker", fail, err)
		return
	}
	defer func() {
		if err := s.close(); err != nil {
			c.failed("broker", fail, err)
		}
	}()
	st, err := s.Status(ctx)
	if err != nil {
		c.failed("broker", fail, err)
		return
	}
	where := fmt.Sprintf("a server runs, process %d, up %s", st.PID, sandboxer.FormatDuration(st.Uptime.Std()))
	if s.inProcess {
		where = "no server runs; tested in this process"
	}
	c.add("broker", ok, "", "%s; database intact; sandboxes: %s", where, countStates(st.Sandboxes))
	exts, err := s.Extensions(ctx)
	if err != nil {
		c.failed("extensions", fail, err)
		return
	}
	for _, e := range exts.Items {
		if e.Problem != "" {
			c.add(e.ID, warn, "", "cannot be used here: %s", e.Problem)
			continue
		}
		offer, err := s.Probe(ctx, e.ID)
		if err != nil {
			c.failed(e.ID, warn, err)
			continue
		}
		room := ""
		if offer.Free >= 0 {
			room = fmt.Sprintf(", room for %d", offer.Free)
		}
		c.add(e.ID, ok, "", "opened, isolation %s%s", join(e.Isolation, ", "), room)
		c.upgrade(e)
	}
	c.boot(ctx, s, p)
	if a, err := s.Audit(ctx); err != nil {
		c.failed("audit", warn, err)
	} else if len(a.Violations) > 0 {
		c.add("audit", fail, "see them with: sandboxer audit", "%d checked, %d violations", a.Checked, len(a.Violations)+a.LeftOut)
	} else {
		c.add("audit", ok, "", "%d checked, no violations", a.Checked)
	}
}

// upgrade reports the losses of a change of versions: of the one that the server made, and of
// the one to this program, which may be about to replace the server's.
func (c *checkup) upgrade(e api.Extension) {
	for _, n := range e.Notices {
		what, fix, _ := strings.Cut(n, "; ")
		c.add(e.ID, warn, fix, "%s", what)
	}
	for _, a := range c.o.f.adapters {
		if a.Kind == e.Adapter && a.Runtime != "" && e.Runtime != "" && a.Runtime != e.Runtime {
			c.add(e.ID, warn, "before a server of this program replaces that one, resume sandboxes that are paused to disk, and save the files of those worth keeping "+
				"(sandboxer snapshot create --portable ID), which any version restores; or keep the programs of the server",
				"the server's is version %s, this program's %s, which cannot restore the memory that the server saves: native snapshots and pauses to disk", e.Runtime, a.Runtime)
		}
	}
}

// boot is the self-test: a sandbox is made, used and destroyed.
func (c *checkup) boot(ctx context.Context, s *session, p *progress) {
	const name = "self-test"
	var id, extension string
	var took [3]time.Duration
	timed := func(i int, do func() error) error {
		begin := time.Now()
		err := do()
		took[i] = time.Since(begin)
		return err
	}
	err := timed(0, func() error {
		sb, err := s.Create(ctx, api.CreateSandbox{Profile: c.o.profile, TTL: 5 * time.Minute,
			Labels: map[string]string{"sandboxer/doctor": "self-test"}, NoWaiting: true})
		if err != nil {
			return err
		}
		id, extension = sb.ID, sb.Extension
		_, err = await(ctx, s, p, sb)
		return err
	})
	if err == nil {
		err = timed(1, func() error {
			out := &capture.First{Max: 2000}
			exit, err := s.Exec(ctx, id, sandboxer.Cmd{Args: []string{"true"}, Stderr: out})
			if err == nil && exit.Code != 0 {
				err = sandboxer.E(sandboxer.Failed, nil, "true ended with %d: %s", exit.Code, strings.TrimSpace(out.String()))
			}
			return err
		})
	}
	if id != "" {
		dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		derr := timed(2, func() error { _, err := s.Destroy(dctx, id, true); return err })
		if err == nil {
			err = derr
		}
	}
	if err != nil {
		c.failed(name, fail, err)
		for i, x := range c.checks {
			if x.Name == extension && x.Status == ok {
				c.checks[i].Status, c.checks[i].Evidence = warn, x.Evidence+"; it failed in the self-test below"
			}
		}
		return
	}
	c.add(name, ok, "", "%s: ready in %s, true ran in %s, destroyed in %s", c.o.profile, ms(took[0]), ms(took[1]), ms(took[2]))
}

func ms(d time.Duration) string { return d.Round(100 * time.Microsecond).String() }

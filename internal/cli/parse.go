package cli

import (
	"bufio"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/sand-boxer/sandboxer"
)

// parseThread reads [USER/]ID. A user may have slashes, an ID has none.
func parseThread(s string) (t sandboxer.Thread, err error) {
	if s == "" {
		return t, nil
	}
	t.ID = s
	if i := strings.LastIndexByte(s, '/'); i >= 0 {
		if t.User, t.ID = s[:i], s[i+1:]; t.User == "" {
			return t, invalid("--thread: %q names no user before the slash", s).WithHint("write USER/ID, or ID alone")
		}
	}
	if _, err := t.SandboxID(); err != nil {
		return t, invalid("--thread: %s", sandboxer.Message(err))
	}
	return t, nil
}

// parseMounts reads SRC:DST[:ro], or the form of --mount in other tools. A relative source is on
// this machine, and the server must be on the same machine: elsewhere is an error about the first such
// source. An absolute one is on the server's machine.
func parseMounts(list []string) (mounts []sandboxer.Mount, elsewhere, err error) {
	for _, v := range list {
		m, err := parseMount(v)
		if err != nil {
			return nil, nil, err
		}
		if !path.IsAbs(m.Target) {
			return nil, nil, invalid("--mount: %q is not an absolute path inside the sandbox", m.Target)
		}
		src := m.Source
		full := inHome(src)
		if !filepath.IsAbs(src) {
			if _, err := os.Stat(full); err != nil {
				return nil, nil, fileError(err, "--mount: %s cannot be mounted", src)
			}
			if elsewhere == nil {
				elsewhere = invalid("--mount: %s is a path of this machine, and the server is on another", src).
					WithHint("give an absolute path of the server's machine, or copy the files in later: sandboxer cp")
			}
		}
		abs, err := filepath.Abs(full)
		if err == nil && !filepath.IsAbs(src) { // the server follows no links, and this one is the user's own
			abs, err = filepath.EvalSymlinks(abs)
		}
		if err != nil {
			return nil, nil, fileError(err, "--mount: %s cannot be mounted", src)
		}
		m.Source, m.Target = abs, path.Clean(m.Target)
		mounts = append(mounts, m)
	}
	return mounts, elsewhere, nil
}

// parseMount reads one mount. A value with key=value before any colon is a list of these.
func parseMount(v string) (m sandboxer.Mount, err error) {
	first, _, _ := strings.Cut(v, ",")
	key, _, isList := strings.Cut(first, "=")
	if !isList || strings.ContainsAny(key, ":/.~") {
		src, rest, _ := strings.Cut(v, ":")
		dst, mode, has := strings.Cut(rest, ":")
		if src == "" || dst == "" || has && mode != "ro" && mode != "rw" {
			return m, invalid("--mount: %q is neither SRC:DST[:ro] nor type=bind,source=SRC,target=DST[,readonly]", v)
		}
		return sandboxer.Mount{Source: src, Target: dst, ReadOnly: mode == "ro"}, nil
	}
	fields, err := csv.NewReader(strings.NewReader(v)).Read()
	if err != nil {
		return m, invalid("--mount: %q is not a list of key=value: %v", v, err)
	}
	for _, f := range fields {
		key, value, has := strings.Cut(f, "=")
		var to *string
		switch key {
		case "type":
			if value != "bind" {
				return m, invalid("--mount: %q is not a type of mount", value).WithHint("the type is bind")
			}
			continue
		case "source", "src":
			to = &m.Source
		case "target", "dst", "destination":
			to = &m.Target
		case "readonly", "ro":
			if m.ReadOnly = true; has {
				if m.ReadOnly, err = strconv.ParseBool(value); err != nil {
					return m, invalid("--mount: %s=%q is neither true nor false", key, value)
				}
			}
			continue
		default:
			return m, invalid("--mount: there is no %q", key).WithHint("write type=bind,source=SRC,target=DST, and readonly if it should be")
		}
		if *to != "" {
			return m, invalid("--mount: the %s is given twice in %q", key, v)
		}
		*to = value
	}
	if m.Source == "" || m.Target == "" {
		return m, invalid("--mount: %q has no source or no target", v).WithHint("write type=bind,source=SRC,target=DST, and readonly if it should be")
	}
	return m, nil
}

// inHome replaces a leading ~/ by the user's home directory: a shell
// does not do that behind key= and before a colon.
func inHome(name string) string {
	if rest, ok := strings.CutPrefix(name, "~/"); ok {
		if home, err := os.UserHomeDir(); err == nil {
			return filepath.Join(home, rest)
		}
	}
	return name
}

// parseSize reads sizes as the catalogue does, always with a unit, and also the short
// units of other tools: m and g without an i count in powers of 1024 there and here.
func parseSize(flag, s string) (int64, error) {
	if s == "" {
		return 0, nil
	}
	digits := strings.TrimRight(s, "BKMGTbkmgti ")
	unit, ok := sizeUnit(strings.TrimSpace(s[len(digits):]))
	n, err := strconv.ParseFloat(digits, 64)
	if err == nil && digits == s {
		return 0, invalid("%s: %q has no unit", flag, s).WithHint("write %sMiB or %sGiB, or %sB for bytes", s, s, s)
	}
	n *= unit
	if !ok || err != nil || strings.Trim(digits, "0123456789.") != "" || !(n >= 1 && n <= 1<<53) || n != math.Trunc(n) {
		return 0, invalid("%s: %q is not a size", flag, s).WithHint("write for example 512MiB or 2GiB")
	}
	return int64(n), nil
}

func sizeUnit(u string) (float64, bool) {
	switch u {
	case "":
		return 0, false
	case "B", "b":
		return 1, true
	}
	power := float64(strings.IndexByte("kmgt", u[0]|0x20) + 1)
	switch rest := u[1:]; {
	case power == 0:
	case rest == "" || rest == "iB" || rest == "ib":
		return math.Pow(1024, power), true
	case rest == "B" || rest == "b":
		return math.Pow(1000, power), true
	}
	return 0, false
}

// parseDuration reads Go's durations, optionally led by whole days.
func parseDuration(flag, s string) (time.Duration, error) {
	bad := invalid("%s: %q is not a duration", flag, s).WithHint("write a number with a unit: 30m, 1h30m, 90s, 2d")
	rest, days := s, time.Duration(0)
	if d, r, ok := strings.Cut(s, "d"); ok {
		n, err := strconv.ParseUint(d, 10, 16)
		if err != nil {
			return 0, bad
		}
		days, rest = time.Duration(n)*24*time.Hour, r
	}
	var d time.Duration
	if rest != "" || days == 0 {
		var err error
		if d, err = time.ParseDuration(rest); err != nil || strings.ContainsAny(rest, "+-") {
			return 0, bad
		}
	}
	if d += days; d <= 0 {
		return 0, invalid("%s: %q is not a positive duration", flag, s).WithHint("write for example 30m")
	}
	return d, nil
}

// durationFlag is a flag with a duration in our form.
type durationFlag time.Duration

func (d *durationFlag) Set(s string) error {
	v, err := parseDuration("", s)
	if err != nil {
		return errors.New("want a number with a unit: 30m, 1h30m, 90s, 2d")
	}
	*d = durationFlag(v)
	return nil
}

func (d *durationFlag) Type() string { return "duration" }

func (d *durationFlag) String() string {
	if *d == 0 { // the help then shows no default
		return ""
	}
	return sandboxer.FormatDuration(time.Duration(*d))
}

// parseTTL reads a time to live: a duration, or idle.
func parseTTL(s string) (time.Duration, error) {
	if s == sandboxer.TTLIdleText {
		return sandboxer.TTLIdle, nil
	}
	return parseDuration("--ttl", s)
}

// parseNetwork reads none, public or allow:a,b.
func parseNetwork(s string) (*sandboxer.NetworkPolicy, error) {
	mode, list, has := strings.Cut(s, ":")
	switch {
	case s == "":
		return nil, nil
	case s == string(sandboxer.NetworkNone), s == string(sandboxer.NetworkPublic):
		return &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkMode(s)}, nil
	case mode == string(sandboxer.NetworkAllow) && has && list != "":
		return &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: strings.Split(list, ",")}, nil
	}
	return nil, invalid("--net: %q is not a network policy", s).WithHint("want none, public or allow:host,…")
}

func keyValues(flag string, list []string) (map[string]string, error) {
	var m map[string]string
	for _, kv := range list {
		k, v, ok := strings.Cut(kv, "=")
		if !ok || k == "" {
			return nil, invalid("%s: %q is not of the form key=value", flag, kv)
		}
		if _, twice := m[k]; twice {
			return nil, invalid("%s: %q is given twice", flag, k)
		}
		if m == nil {
			m = map[string]string{}
		}
		m[k] = v
	}
	return m, nil
}

// localInputs makes the paths of local directories among the inputs absolute: the
// server has another working directory. A server on another machine does not have them at all:
// elsewhere is an error about the first one.
func localInputs(inputs map[string]string) (elsewhere, err error) {
	for _, k := range slices.Sorted(maps.Keys(inputs)) {
		v := inputs[k]
		rel := v == "." || v == ".." || strings.HasPrefix(v, "./") || strings.HasPrefix(v, "../")
		if full := inHome(v); full != v {
			v, rel = full, true
		}
		if !rel {
			if k != "repo" || filepath.IsAbs(v) || strings.Contains(v, ":") {
				continue
			}
			if st, err := os.Stat(v); err != nil || !st.IsDir() {
				continue
			}
		}
		abs, err := filepath.Abs(v)
		if err != nil {
			return nil, sandboxer.E(sandboxer.Invalid, err, "--input %s: %q cannot be made absolute", k, v)
		}
		if st, err := os.Stat(abs); err != nil {
			return nil, fileError(err, "--input %s: %s cannot be used", k, v)
		} else if !st.IsDir() {
			return nil, invalid("--input %s: %s is not a directory", k, v).WithHint("name the directory that the file is in")
		}
		if elsewhere == nil {
			elsewhere = invalid("--input %s: %s is a directory of this machine, and the server is on another", k, v).
				WithHint("give a git URL, or copy the files in later: sandboxer cp")
		}
		inputs[k] = abs
	}
	return elsewhere, nil
}

// envFlags are the flags that set an environment.
type envFlags struct {
	vars, files []string
}

func (e *envFlags) bind(fl *pflag.FlagSet) {
	fl.StringArrayVarP(&e.vars, "env", "e", nil, "environment `NAME=VALUE`, or NAME to pass on yours")
	fl.StringArrayVar(&e.files, "env-file", nil, "`FILE` with lines NAME=VALUE")
}

// read returns what the flags set. A file may be a pipe, which can be read once.
func (e *envFlags) read(lookup func(string) (string, bool)) (map[string]string, error) {
	return environment(lookup, e.vars, e.files)
}

// maxEnvFile bounds a file of variables, in bytes.
const maxEnvFile = 1 << 20

// environment merges files and flags; the flags win. A name without a value takes
// the caller's value, if there is one.
func environment(lookup func(string) (string, bool), flags, files []string) (map[string]string, error) {
	env := map[string]string{}
	add := func(where, kv string) error {
		k, v, ok := strings.Cut(kv, "=")
		if !isEnvName(k) {
			return invalid("%s: %q is not the name of an environment variable", where, k).WithHint("write NAME=value, or NAME to pass on yours")
		}
		if !ok {
			if v, ok = lookup(k); !ok {
				return nil
			}
		}
		env[k] = v
		return nil
	}
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, fileError(err, "--env-file: %s cannot be read", name)
		}
		all := &io.LimitedReader{R: f, N: maxEnvFile + 1}
		sc := bufio.NewScanner(all)
		sc.Buffer(nil, maxEnvFile+1)
		for n := 1; sc.Scan(); n++ {
			line := strings.TrimSuffix(sc.Text(), "\r")
			if t := strings.TrimSpace(line); t == "" || t[0] == '#' {
				continue
			}
			if err := add(fmt.Sprintf("%s:%d", name, n), strings.TrimLeft(line, " \t")); err != nil {
				f.Close()
				return nil, err
			}
		}
		if all.N == 0 {
			f.Close()
			return nil, invalid("--env-file: %s holds more than %d bytes", name, maxEnvFile)
		}
		if err := errors.Join(sc.Err(), f.Close()); err != nil {
			return nil, fileError(err, "--env-file: %s cannot be read", name)
		}
	}
	for _, kv := range flags {
		if err := add("--env", kv); err != nil {
			return nil, err
		}
	}
	if len(env) == 0 {
		return nil, nil
	}
	return env, nil
}

func isEnvName(s string) bool {
	for i := range len(s) {
		c := s[i]
		if c != '_' && (c|0x20 < 'a' || c|0x20 > 'z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

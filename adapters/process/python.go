package process

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/subprocess"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
	sdk "github.com/sand-boxer/sandboxer/sdk/python"
)

// The oldest supported Python.
const (
	oldestMajor = 3
	oldestMinor = 9
)

// python sets how the class of p is run. Kinds: Unavailable when no suitable Python is found; Invalid if the
// file names an unsuitable one.
func (p *program) python() error {
	name, at, kind := p.Python, "python: ", sandboxer.Invalid
	if name == "" {
		name, at, kind = "python3", "", sandboxer.Unavailable
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return sandboxer.E(kind, nil, "%sa class needs %s, which this machine does not have (%s)", at, name, reason(err)).
			WithHint("install Python %d.%d or newer, or name it with python: in the extension's file", oldestMajor, oldestMinor)
	}
	if path, err = filepath.Abs(path); err != nil {
		return err
	}
	said, err := versionOf(path)
	if err != nil {
		return sandboxer.E(kind, err, "%s%s is not a usable Python: %s", at, path, err)
	}
	var major, minor int
	if n, _ := fmt.Sscanf(said, "%d.%d", &major, &minor); n != 2 || major < oldestMajor || major == oldestMajor && minor < oldestMinor {
		return sandboxer.E(kind, nil, "%s%s is Python %.40s; a class needs %d.%d or newer", at, path, said, oldestMajor, oldestMinor).
			WithHint("name a newer one with python: in the extension's file")
	}
	p.modules = append([]string{}, p.Path...)
	dir := p.SDK
	if dir != "" {
		if _, err := os.Stat(filepath.Join(dir, sdk.Host)); err != nil {
			return sandboxer.E(sandboxer.Invalid, nil, "sdk: %s has no %s", dir, sdk.Host)
		}
		p.modules = append(p.modules, filepath.Join(dir, "sandboxer"))
	}
	// -I: neither the environment nor the working directory says where modules are; -u: nothing is buffered; -X utf8:
	// names of files keep their bytes whatever the locale.
	p.command = []string{path, "-I", "-u", "-X", "utf8", filepath.Join(dir, sdk.Host)}
	p.sdk = dir
	return nil
}

// versions caches the versions of interpreters, by path, size and date: to ask one takes longer than all else.
var versions sync.Map

// versionOf asks an interpreter for its version, such as "3.11.7".
func versionOf(path string) (string, error) {
	st, err := os.Stat(path)
	if err != nil {
		return "", err
	}
	key := fmt.Sprint(path, st.Size(), st.ModTime().UnixNano())
	if v, ok := versions.Load(key); ok {
		return v.(string), nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	stderr := &capture.First{Max: 1 << 10}
	cmd := subprocess.Command(ctx, subprocess.Tool, path, "-I", "-c", "import sys; print('.'.join(map(str, sys.version_info[:3])))")
	cmd.Env = []string{}
	cmd.Stderr = stderr
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		if text := strings.TrimSpace(stderr.String()); text != "" {
			err = errors.New(strconv.Quote(text))
		}
		return "", err
	}
	said := strings.TrimSpace(string(out))
	versions.Store(key, said)
	return said, nil
}

// sdkDigest identifies the package that this program carries.
var sdkDigest = sync.OnceValue(func() string {
	h := sha256.New()
	_ = fs.WalkDir(sdk.FS, ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			data, _ := fs.ReadFile(sdk.FS, name)
			fmt.Fprintf(h, "%s\x00%d\x00", name, len(data))
			h.Write(data)
		}
		return err
	})
	return hex.EncodeToString(h.Sum(nil))[:16]
})

// sdkDir is where the package that this program carries is unpacked, below an extension's directory.
const sdkDir = "sdk"

// unpackSDK unpacks the package in dir, unless the file names another, and has the command use it. Packages of other builds
// are removed.
func (p *program) unpackSDK(dir string) error {
	if p.sdk != "" {
		return nil
	}
	all := filepath.Join(dir, sdkDir)
	own := filepath.Join(all, sdkDigest())
	// Relative to the process's directory: with the rights of another user it might not reach this by the whole path.
	p.command[len(p.command)-1] = filepath.Join(sdkDir, filepath.Base(own), sdk.Host)
	failed := func(err error) error {
		return sandboxer.E(sandboxer.Unavailable, err, "the Python package cannot be unpacked into %s", all)
	}
	if err := os.MkdirAll(all, 0o755); err != nil {
		return failed(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	lock, err := filelock.Take(ctx, filepath.Join(all, "lock"), filelock.Exclusive)
	if err != nil {
		return failed(err)
	}
	defer lock.Release()
	entries, err := os.ReadDir(all)
	if err != nil {
		return failed(err)
	}
	for _, e := range entries {
		if e.IsDir() && e.Name() != filepath.Base(own) {
			_ = os.RemoveAll(filepath.Join(all, e.Name())) // one that runs has read its files
		}
	}
	if _, err := os.Stat(own); err == nil {
		return nil
	}
	tmp, err := os.MkdirTemp(all, "new-")
	if err != nil {
		return failed(err)
	}
	defer os.RemoveAll(tmp)
	if err := os.CopyFS(tmp, sdk.FS); err != nil {
		return failed(err)
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return failed(err)
	}
	if err := errors.Join(os.Rename(tmp, own), wholefile.SyncDir(all)); err != nil {
		return failed(err)
	}
	return nil
}

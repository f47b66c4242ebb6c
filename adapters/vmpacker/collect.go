package vmpacker

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// hold finds the disk that the machine at p begins with, and records that p is based on
// it before another call may remove it.
func (e *extension) hold(ctx context.Context, p *place) error {
	for {
		disk, err := e.image(ctx, p.Shape.Image)
		if err != nil {
			return err
		}
		key, ours := e.keyOf(disk)
		if !ours {
			p.Shape.Disk = disk
			return nil
		}
		unlock, err := e.env.Notes.Lock(ctx, "image."+key)
		if err != nil {
			return err
		}
		_, gone := os.Stat(e.dir("image", key+".json"))
		if gone == nil {
			p.Shape.Disk = disk
			err = e.remember(ctx, p)
		}
		unlock()
		if gone == nil {
			return err
		}
		if !errors.Is(gone, fs.ErrNotExist) {
			return sandboxer.E(sandboxer.Unavailable, gone, "the record of image %s cannot be read", p.Shape.Image)
		}
		// It was old, and was collected in between: build it again.
	}
}

// keyOf returns the key of an image that Packer built from the name of its file.
func (e *extension) keyOf(disk string) (key string, ours bool) {
	name, ours := strings.CutPrefix(disk, e.dir("image")+string(os.PathSeparator))
	return strings.TrimSuffix(name, ".qcow2"), ours
}

// failedLogs is how long the log of a failed build is kept.
const failedLogs = 7 * 24 * time.Hour

// collect removes images that Packer built if there is a newer one of the same name, or
// no configuration uses the name, and if neither a machine nor a snapshot is based on
// them; and the remains of failed builds. It leaves to the next time what another
// process uses, and what it cannot check.
func (e *extension) collect(ctx context.Context) {
	records := map[string]artefact{}
	newest := map[string]artefact{}
	files, err := os.ReadDir(e.dir("image"))
	if err != nil {
		return
	}
	keys := map[string]bool{}
	for _, f := range files {
		key, kind, _ := strings.Cut(f.Name(), ".")
		if strings.HasPrefix(f.Name(), ".") {
			continue // a record that is being written
		}
		fi, err := f.Info()
		if err != nil || kind == "log" && time.Since(fi.ModTime()) < failedLogs {
			continue // a log alone is no reason to check its key
		}
		keys[key] = true
		if kind != "json" {
			continue
		}
		var a artefact
		data, err := os.ReadFile(e.dir("image", f.Name()))
		if err == nil {
			_, err = strictjson.DecodeStored(data, &a)
		}
		if err != nil {
			return
		}
		records[key] = a
		if n, ok := newest[a.Image]; !ok || a.BuiltAt.After(n.BuiltAt) || a.BuiltAt.Equal(n.BuiltAt) && a.Key > n.Key {
			newest[a.Image] = a
		}
	}
	for key := range keys {
		a, built := records[key]
		if e.cfg.Images[a.Image].Packer != nil && newest[a.Image].Key == key {
			continue
		}
		if err := e.discard(ctx, key, built); err != nil {
			e.log.Debug("an old image is kept", "image", a.Image, "key", key, "err", err)
		} else if built {
			e.log.Info("an old image was removed", "image", a.Image, "key", key)
		}
	}
}

var errPinned = errors.New("a machine or a snapshot is based on it")

// discard removes all files of key, if nothing is based on it.
func (e *extension) discard(ctx context.Context, key string, built bool) error {
	c, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	unlock, err := e.env.Notes.Lock(c, "image."+key)
	if err != nil {
		return err // it is being built, or a machine will be based on it
	}
	defer unlock()
	record := e.dir("image", key+".json")
	if _, err := os.Stat(record); built != (err == nil) {
		return errors.New("it has changed meanwhile")
	}
	based, err := e.based(ctx)
	if err != nil {
		return err
	}
	if based[e.dir("image", key+".qcow2")] {
		return errPinned
	}
	// The record first: without it nothing is based on the rest.
	for _, end := range []string{".json", ".qcow2", ".qcow2.new", ".work"} {
		if err := os.RemoveAll(e.dir("image", key+end)); err != nil {
			return err
		}
	}
	if fi, err := os.Stat(e.dir("image", key+".log")); err == nil && (built || time.Since(fi.ModTime()) > failedLogs) {
		return os.Remove(e.dir("image", key+".log"))
	}
	return nil
}

// based returns the disks that machines and snapshots are based on. It reads the
// machines twice: a machine may become a snapshot meanwhile, and a snapshot a machine.
func (e *extension) based(ctx context.Context) (map[string]bool, error) {
	all := map[string]bool{}
	machines := func() error {
		noted, err := e.noted(ctx)
		for _, p := range noted {
			if p.Kind == managed {
				all[p.Shape.Disk] = true
			}
		}
		return err
	}
	if err := machines(); err != nil {
		return nil, err
	}
	snaps, err := os.ReadDir(e.dir("snap"))
	if err != nil {
		return nil, err
	}
	for _, d := range snaps {
		s, err := e.savedAs(d.Name())
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			continue // it is being made, of a machine with a note
		}
		if err != nil {
			return nil, err
		}
		all[s.Shape.Disk] = true
	}
	return all, machines()
}

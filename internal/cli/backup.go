package cli

import (
	"context"
	"log/slog"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/sqlstore"
)

type backupOptions struct {
	f    *factory
	file string
}

func newCmdBackup(f *factory) *cobra.Command {
	o := &backupOptions{f: f}
	c := &cobra.Command{
		Use:   "backup [FILE]",
		Short: "Copy the database of this machine's server into one checked file",
		Long: "Copy the database of this machine's data directory, in use or not, into one checked file and print its name.\n" +
			"Without FILE it goes into the data directory, next to the server's hourly backups.",
		Args: wants(0, 1, "at most one file"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				var err error
				if o.file, err = filepath.Abs(args[0]); err != nil {
					return sandboxer.E(sandboxer.Invalid, err, "%q cannot be made absolute", args[0])
				}
			}
			return backupRun(cmd.Context(), o)
		},
	}
	c.AddCommand(newCmdBackupRestore(f))
	return c
}

// backupInfo is one backup, for printing.
type backupInfo struct {
	File string    `json:"file"`
	At   time.Time `json:"at"`
	Size int64     `json:"size"`
}

func backupRun(ctx context.Context, o *backupOptions) error {
	s, err := o.f.settings()
	if err != nil {
		return err
	}
	b, err := sqlstore.BackUp(ctx, s.get("data_dir"), o.file, s.number("keep_backups"))
	if err != nil {
		return err
	}
	return printOne(o.f, &backupInfo{b.File, b.At, b.Size}, view[*backupInfo]{name: func(b *backupInfo) string { return b.File }})
}

func newCmdBackupRestore(f *factory) *cobra.Command {
	o := &backupOptions{f: f}
	return &cobra.Command{
		Use:   "restore [BACKUP]",
		Short: "Replace the database with a backup",
		Long: "Replace the database in this machine's data directory with BACKUP, or with the newest complete one. The former database\n" +
			"is kept next to it. No server may run. Sandboxes made after the backup are not in the restored database:\n" +
			"the next server quarantines them (sandboxer ls --quarantined). It ends nothing by time until 'sandboxer accept'.",
		Args: wants(0, 1, "at most one backup"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				o.file = args[0]
			}
			return backupRestoreRun(cmd.Context(), o)
		},
	}
}

func backupRestoreRun(ctx context.Context, o *backupOptions) error {
	s, err := o.f.settings()
	if err != nil {
		return err
	}
	dir := s.get("data_dir")
	from, suffix, err := sqlstore.Restore(ctx, dir, o.file)
	if err != nil {
		return err
	}
	p := o.f.progress()
	defer p.stop()
	p.done("restored %s", from)
	if suffix != "" {
		p.note("the former database is kept as %s", filepath.Join(dir, "sandboxer.db"+suffix))
	}
	p.note("objects made since the backup are kept; see them with: sandboxer audit; no deadline counts until an administrator runs: sandboxer accept")
	return nil
}

// backUpRegularly makes a backup whenever the newest is as old as every, until ctx
// ends. every 0 makes none.
func backUpRegularly(ctx context.Context, log *slog.Logger, dir string, every time.Duration, keep int) {
	if every == 0 {
		return
	}
	next := time.Now()
	if all := sqlstore.Backups(dir); len(all) > 0 {
		next = all[0].At.Add(every)
	}
	for {
		t := time.NewTimer(max(time.Until(next), 0))
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
		next = time.Now().Add(every)
		b, err := sqlstore.BackUp(ctx, dir, "", keep)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			log.Error("backup of the database", "err", err)
		default:
			log.Info("backup of the database", "file", b.File, "bytes", b.Size)
		}
		debug.FreeOSMemory() // several megabytes, not needed again for long
	}
}

// checkSpan accepts a duration, or 0 for never.
func checkSpan(s string) error {
	if s == "0" {
		return nil
	}
	_, err := parseDuration("", s)
	if err != nil {
		return invalid("%q is not a duration", s).WithHint("write a number with a unit, 30m, 1h30m or 30d, or 0 for never")
	}
	return nil
}

func checkCount(s string) error {
	if n, err := strconv.Atoi(s); err != nil || n < 1 || strings.HasPrefix(s, "+") {
		return invalid("%q is not a number from 1", s)
	}
	return nil
}

// span is a setting that checkSpan accepted.
func (s *settings) span(key string) time.Duration {
	if s.get(key) == "0" {
		return 0
	}
	d, _ := parseDuration("", s.get(key))
	return d
}

// number is a setting that checkCount accepted.
func (s *settings) number(key string) int {
	n, _ := strconv.Atoi(s.get(key))
	return n
}

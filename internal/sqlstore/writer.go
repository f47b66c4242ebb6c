package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"slices"

	"github.com/sand-boxer/sandboxer"
)

// maxGroup bounds how many requests share one commit, and with it how long the
// first of them waits.
const maxGroup = 256

// A writer owns the only connection that writes. Its goroutine commits in groups:
// requests that arrive while the disk is busy with the last commit share the next
// one. No request waits for others; a lone request is committed at once.
type writer struct {
	conn    *sql.Conn
	stmts   map[string]*sql.Stmt // by their text
	reserve *reserve

	queue   chan *request // unbuffered: what was handed over will be answered
	closing chan struct{} // closed by stop
	stopped chan struct{} // closed when the goroutine has ended
	group   []*request
}

// A request is one transaction of a caller.
type request struct {
	do    func(*tx) error // may be run again after a failed attempt
	grows bool            // refused while the disk is full
	done  chan error
	err   error
}

// A tx runs statements in the current group.
type tx struct{ w *writer }

func newWriter(conn *sql.Conn, r *reserve) *writer {
	w := &writer{
		conn:    conn,
		stmts:   map[string]*sql.Stmt{},
		reserve: r,
		queue:   make(chan *request),
		closing: make(chan struct{}),
		stopped: make(chan struct{}),
	}
	go w.run()
	return w
}

// write runs do in a transaction and returns once it is durable. A ctx that ends
// before the writer takes the request changes nothing; after that write waits for the
// answer, so that it is always the truth.
func (w *writer) write(ctx context.Context, grows bool, do func(*tx) error) error {
	if err := ctx.Err(); err != nil {
		return sandboxer.E(sandboxer.KindOf(err), err, "nothing was written: the caller left or the time ran out")
	}
	r := &request{do: do, grows: grows, done: make(chan error, 1)}
	select {
	case w.queue <- r:
		return <-r.done
	case <-ctx.Done():
		return sandboxer.E(sandboxer.KindOf(ctx.Err()), ctx.Err(), "nothing was written: the caller left or the time ran out")
	case <-w.stopped:
		return errClosed()
	}
}

// stop answers accepted requests, ends the goroutine and returns the connection.
// The statements of a single connection have to be closed one by one, or SQLite
// keeps the database open.
func (w *writer) stop() error {
	close(w.closing)
	<-w.stopped
	var errs []error
	for _, st := range w.stmts {
		errs = append(errs, st.Close())
	}
	return errors.Join(append(errs, w.conn.Close())...)
}

func (w *writer) run() {
	defer close(w.stopped)
	for {
		select {
		case r := <-w.queue:
			w.commit(r)
		case <-w.closing:
			return
		}
	}
}

// commit serves first and all requests that arrive before it is ready to commit.
func (w *writer) commit(first *request) {
	w.group = append(w.group[:0], first)
	w.reserve.refill()
	err := w.attempt(true)
	for gave := true; isFull(err) && gave; {
		gave = w.reserve.release()
		w.exec("PRAGMA wal_checkpoint(PASSIVE)") // lets the log start again in the space it has
		err = w.attempt(false)
	}
	if isCorrupt(err) && len(w.group) > 1 {
		// One damaged page must not fail requests that only share the commit.
		for _, r := range slices.Clone(w.group) {
			w.group = append(w.group[:0], r)
			w.answer(w.attempt(false))
		}
		return
	}
	w.answer(err)
}

// answer sends the result of the attempt to all requests in the group.
func (w *writer) answer(err error) {
	err = wrap(err, "write the database")
	for i, r := range w.group {
		if err == nil {
			r.done <- r.err
		} else {
			r.done <- err // what r itself met may be due to what was just undone
		}
		w.group[i] = nil
	}
}

// attempt runs the group in one transaction, taking in newcomers if more is set.
// A request that fails alone keeps its error and is undone alone; an error of
// the database undoes everything and is returned.
func (w *writer) attempt(more bool) error {
	if err := w.exec("BEGIN IMMEDIATE"); err != nil {
		return err
	}
	for i := 0; i < len(w.group); i++ {
		if err := w.one(w.group[i], i == 0); err != nil {
			w.exec("ROLLBACK") // fails if SQLite has already rolled back
			return err
		}
		if more && i == len(w.group)-1 && len(w.group) < maxGroup {
			select {
			case r := <-w.queue:
				w.group = append(w.group, r)
			default:
			}
		}
	}
	if err := w.exec("COMMIT"); err != nil {
		w.exec("ROLLBACK")
		return err
	}
	return nil
}

// one runs r. The first of a transaction needs no savepoint: it can be undone by
// starting the transaction again.
func (w *writer) one(r *request, first bool) error {
	if r.grows && w.reserve.full {
		r.err = errFull()
		return nil
	}
	if !first {
		if err := w.exec("SAVEPOINT request"); err != nil {
			return err
		}
	}
	r.err = r.do(&tx{w})
	switch {
	case breaksTransaction(r.err):
		return r.err
	case r.err != nil && first:
		if err := w.exec("ROLLBACK"); err != nil {
			return err
		}
		return w.exec("BEGIN IMMEDIATE")
	case r.err != nil:
		if err := w.exec("ROLLBACK TO request"); err != nil {
			return err
		}
	}
	if !first {
		return w.exec("RELEASE request")
	}
	return nil
}

func (w *writer) exec(query string) error {
	_, err := (&tx{w}).exec(query)
	return err
}

func (w *writer) stmt(query string) (*sql.Stmt, error) {
	if st := w.stmts[query]; st != nil {
		return st, nil
	}
	st, err := w.conn.PrepareContext(context.Background(), query)
	if err != nil {
		return nil, err
	}
	w.stmts[query] = st
	return st, nil
}

// exec returns the number of rows that query changed. Every query is prepared once,
// so its text must be constant.
func (t *tx) exec(query string, args ...any) (int64, error) {
	st, err := t.w.stmt(query)
	if err != nil {
		return 0, err
	}
	res, err := st.ExecContext(context.Background(), args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

// row scans the only row of query into dest and reports whether there was one.
func (t *tx) row(query string, args []any, dest ...any) (bool, error) {
	st, err := t.w.stmt(query)
	if err != nil {
		return false, err
	}
	err = st.QueryRowContext(context.Background(), args...).Scan(dest...)
	if errors.Is(err, sql.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

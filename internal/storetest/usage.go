package storetest

import (
	"fmt"
	"reflect"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func usageRow(key string) sandboxer.UsageRow {
	return sandboxer.UsageRow{Key: key, Type: sandboxer.UsageSettled, Tenant: "acme", SandboxID: "x", Generation: 1, At: start, From: start, Until: start}
}

func (s *suite) use(keys ...string) {
	s.Helper()
	for _, key := range keys {
		s.ok(s.Write(s.ctx, sandboxer.Writes{Usage: []sandboxer.UsageRow{usageRow(key)}}))
	}
}

// wantUsage checks the keys of the rows that q selects.
func (s *suite) wantUsage(q sandboxer.UsageQuery, want ...string) []sandboxer.UsageRow {
	s.Helper()
	rows, err := s.UsageRows(s.ctx, q)
	s.ok(err)
	got := make([]string, len(rows))
	for i, r := range rows {
		got[i] = r.Key
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		s.Errorf("UsageRows(%+v) = %q; want %q", q, got, want)
	}
	return rows
}

func usageEveryField(s *suite) {
	want := filled[sandboxer.UsageRow](s.T)
	s.ok(s.Write(s.ctx, sandboxer.Writes{Usage: []sandboxer.UsageRow{want}}))
	truncateTimes(reflect.ValueOf(&want).Elem())
	got := s.wantUsage(sandboxer.UsageQuery{}, want.Key)[0]
	if got.Seq <= 0 {
		s.Errorf("its number is %d", got.Seq)
	}
	want.Seq = got.Seq
	s.same("row", got, want)
	s.fails(s.Write(s.ctx, sandboxer.Writes{Usage: []sandboxer.UsageRow{{Key: "no tenant"}}}), sandboxer.Invalid)
}

func usageOnce(s *suite) {
	s.use("a", "a", "b")
	again := usageRow("a")
	again.Charged = 5
	s.ok(s.Write(s.ctx, sandboxer.Writes{Usage: []sandboxer.UsageRow{again}}))
	if rows := s.wantUsage(sandboxer.UsageQuery{}, "a", "b"); rows[0].Charged != 0 {
		s.Error("a row was changed")
	}
}

func usagePages(s *suite) {
	late, other := usageRow("late"), usageRow("other")
	late.At, other.Tenant = start.Add(time.Hour), "other"
	s.use("a", "b")
	s.ok(s.Write(s.ctx, sandboxer.Writes{Usage: []sandboxer.UsageRow{other, late}}))
	rows := s.wantUsage(sandboxer.UsageQuery{Limit: 2}, "a", "b")
	s.wantUsage(sandboxer.UsageQuery{After: rows[1].Seq}, "other", "late")
	s.wantUsage(sandboxer.UsageQuery{Tenant: "other"}, "other")
	s.wantUsage(sandboxer.UsageQuery{Since: start.Add(time.Minute)}, "late")
	s.wantUsage(sandboxer.UsageQuery{Until: start.Add(time.Hour), Tenant: "acme"}, "a", "b")
}

func usageAtomic(s *suite) {
	w := everything("x")
	w.Usage = []sandboxer.UsageRow{usageRow("a")}
	w.Cover, w.Entries = true, []sandboxer.Entry{entry("h", sandboxer.EntryHold, "a", 1, -1)}
	s.fails(s.Write(s.ctx, w), sandboxer.NoCredit)
	s.wantUsage(sandboxer.UsageQuery{})
	w = everything("x")
	w.Usage, w.Sink = []sandboxer.UsageRow{usageRow("a")}, &sandboxer.SinkChange{Name: "books", From: 3, To: 4}
	s.fails(s.Write(s.ctx, w), sandboxer.Conflict)
	s.wantUsage(sandboxer.UsageQuery{})
	s.wroteNothing("x")
}

func usageForgotten(s *suite) {
	s.use("a", "b")
	late := usageRow("late")
	late.At = start.Add(time.Hour)
	s.ok(s.Write(s.ctx, sandboxer.Writes{Usage: []sandboxer.UsageRow{late}}))
	rows := s.wantUsage(sandboxer.UsageQuery{}, "a", "b", "late")
	s.sink(sandboxer.SinkChange{Name: "books", To: rows[2].Seq, Dead: []sandboxer.DeadLetter{{Seq: rows[0].Seq}, {Seq: rows[2].Seq}}})
	for _, want := range []int{1, 1, 0} {
		n, err := s.ForgetUsage(s.ctx, start.Add(time.Minute), 1)
		s.ok(err)
		if n != want {
			s.Errorf("%d were forgotten; want %d", n, want)
		}
	}
	s.wantUsage(sandboxer.UsageQuery{}, "late")
	s.wantDead("books", rows[2].Seq)
	_, err := s.ForgetUsage(s.ctx, start.Add(2*time.Hour), 10)
	s.ok(err)
	s.use("new")
	if got := s.wantUsage(sandboxer.UsageQuery{}, "new"); got[0].Seq <= rows[2].Seq {
		s.Errorf("number %d was given out twice", got[0].Seq)
	}
}

// sink makes a change, from where the sink is.
func (s *suite) sink(c sandboxer.SinkChange) {
	s.Helper()
	c.From = s.state(c.Name).Seq
	s.ok(s.Write(s.ctx, sandboxer.Writes{Sink: &c}))
}

func (s *suite) state(name string) sandboxer.SinkState {
	s.Helper()
	all, err := s.SinkStates(s.ctx)
	s.ok(err)
	for _, st := range all {
		if st.Name == name {
			return st
		}
	}
	return sandboxer.SinkState{}
}

func (s *suite) wantDead(name string, want ...int64) []sandboxer.DeadLetter {
	s.Helper()
	all, err := s.DeadLetters(s.ctx, sandboxer.DeadLetterQuery{Sink: name})
	s.ok(err)
	got := make([]int64, len(all))
	for i, d := range all {
		got[i] = d.Seq
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		s.Errorf("dead letters of %s: %d; want %d", name, got, want)
	}
	return all
}

func sinkCursor(s *suite) {
	s.use("a", "b", "c")
	seqs := s.wantUsage(sandboxer.UsageQuery{}, "a", "b", "c")
	s.sink(sandboxer.SinkChange{Name: "books", To: seqs[0].Seq, At: start})
	s.sink(sandboxer.SinkChange{Name: "other", Problem: "no answer", Stopped: true, At: start})
	s.sink(sandboxer.SinkChange{Name: "other", Problem: "still none", At: start.Add(time.Hour)})
	s.same("books", s.state("books"), sandboxer.SinkState{Name: "books", Seq: seqs[0].Seq, Behind: 2})
	s.same("other", s.state("other"), sandboxer.SinkState{Name: "other", Behind: 3, Problem: "still none", Since: start})
	errs := parallel(8, func(int) error {
		return s.Write(s.ctx, sandboxer.Writes{Sink: &sandboxer.SinkChange{Name: "books", From: seqs[0].Seq, To: seqs[1].Seq}})
	})
	if ok, conflict := count(errs, ""), count(errs, sandboxer.Conflict); ok != 1 || conflict != 7 {
		s.Errorf("%d writers moved the sink and %d met a conflict; want 1 and 7", ok, conflict)
	}
	s.sink(sandboxer.SinkChange{Name: "books", To: 0})
	if st := s.state("books"); st.Behind != 3 {
		s.Errorf("back at the beginning it is %+v", st)
	}
	s.sink(sandboxer.SinkChange{Name: "other", Forget: true})
	s.same("forgotten", s.state("other"), sandboxer.SinkState{})
}

func sinkDead(s *suite) {
	s.use("a", "b", "c")
	rows := s.wantUsage(sandboxer.UsageQuery{}, "a", "b", "c")
	at := func(i int) sandboxer.DeadLetter {
		return sandboxer.DeadLetter{Sink: "books", Seq: rows[i].Seq, At: start, Reason: "refused"}
	}
	s.sink(sandboxer.SinkChange{Name: "books", To: rows[2].Seq, Dead: []sandboxer.DeadLetter{at(0), at(2)}})
	s.sink(sandboxer.SinkChange{Name: "other", Dead: []sandboxer.DeadLetter{at(1)}})
	s.same("letter", s.wantDead("books", rows[0].Seq, rows[2].Seq)[0], at(0))
	s.wantUsage(sandboxer.UsageQuery{Again: "books"})
	st := s.state("books")
	s.sink(sandboxer.SinkChange{Name: "books", To: st.Seq, Again: true})
	s.wantUsage(sandboxer.UsageQuery{Again: "books"}, "a", "c")
	s.wantUsage(sandboxer.UsageQuery{Again: "other"})
	s.sink(sandboxer.SinkChange{Name: "books", To: st.Seq, Gone: []int64{rows[0].Seq}, Dead: []sandboxer.DeadLetter{at(2)}})
	s.wantUsage(sandboxer.UsageQuery{Again: "books"})
	s.wantDead("books", rows[2].Seq)
	s.sink(sandboxer.SinkChange{Name: "books", Forget: true})
	s.wantDead("books")
	s.wantDead("other", rows[1].Seq)
}

func usageReopen(s *suite) {
	if s.reopen == nil {
		s.Skip("this store does not outlive its process")
	}
	s.use("a")
	s.sink(sandboxer.SinkChange{Name: "books", Dead: []sandboxer.DeadLetter{{Seq: 1}}, Problem: "none", At: start})
	was := s.state("books")
	s.Store = s.reopen(s.T, s.Store)
	s.wantUsage(sandboxer.UsageQuery{}, "a")
	s.same("sink", s.state("books"), was)
	s.wantDead("books", 1)
}

func listBilling(s *suite) {
	bills := func(b sandboxer.Billing) func(*sandboxer.Sandbox) {
		return func(sb *sandboxer.Sandbox) { sb.State, sb.Billing = sandboxer.Terminated, b }
	}
	s.create("none", 1)
	s.create("waits", 1, bills(sandboxer.BillingPending))
	sb := s.create("late", 1, bills(sandboxer.BillingEstimated))
	if got := s.list(sandboxer.Query{Billing: sandboxer.BillingEstimated}); fmt.Sprint(got) != "[late]" {
		s.Errorf("estimated: %q", got)
	}
	s.update(sb, bills(""))
	if got := s.list(sandboxer.Query{Billing: sandboxer.BillingEstimated}); len(got) != 0 {
		s.Errorf("estimated: %q", got)
	}
}

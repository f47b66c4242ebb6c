package extensiontest

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

func poll(t *testing.T, what string, limit time.Duration, ok func() bool) {
	t.Helper()
	end := time.Now().Add(limit)
	for !ok() {
		if stopped.Err() != nil {
			t.Fatalf("the suite was stopped while it waited for %s", what)
		}
		if time.Now().After(end) {
			t.Errorf("waited %s for %s in vain", limit, what)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// closeTime is how long an extension may take to close on a machine with other work.
const closeTime = time.Minute

// ctx bounds one call, so that an extension that hangs fails instead of stopping the
// suite.
func ctx(t *testing.T) context.Context {
	c, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	forget := context.AfterFunc(stopped, cancel)
	t.Cleanup(func() { forget(); cancel() })
	return c
}

// wantKind reports an error unless err has one of the kinds.
func wantKind(t *testing.T, err error, what string, kinds ...sandboxer.Kind) {
	t.Helper()
	if !slices.Contains(kinds, sandboxer.KindOf(err)) {
		t.Errorf("%s: got %s; want kind %q", what, describe(err), kinds)
	}
	if err != nil && sandboxer.Message(err) == "" {
		t.Errorf("%s: the %s error has no message", what, sandboxer.KindOf(err))
	}
}

func describe(err error) string {
	if err == nil {
		return "no error"
	}
	return fmt.Sprintf("%s error %q", sandboxer.KindOf(err), err)
}

// viaJSON returns h as the store returns it.
func viaJSON(t *testing.T, h sandboxer.Handle) (out sandboxer.Handle) {
	t.Helper()
	j, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(j, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// Echo listens on addr and echoes every connection, closing it once its peer has
// closed its side. It returns only on failure. A test binary can offer it to
// Harness.Listen by calling it from TestMain.
func Echo(addr string) error {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go echo(c)
	}
}

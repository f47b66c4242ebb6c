package access

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

func TestLimiter(t *testing.T) {
	u := NewLimiter("commands", AtOnce{Sandbox: 2, Key: 3, Tenant: 4, Total: 5})
	p := func(actor, tenant string) sandboxer.Principal {
		return sandboxer.Principal{Actor: actor, Tenant: tenant}
	}
	var ends []func()
	begin := func(sandbox, actor, tenant string, want string) {
		t.Helper()
		end, err := u.Begin(sandbox, tenant, p(actor, tenant))
		switch {
		case want == "" && err != nil:
			t.Errorf("%s of %s: %v", sandbox, actor, err)
		case want != "" && (!errors.Is(err, sandboxer.Exhausted) || sandboxer.RetryAfterOf(err) <= 0 || sandboxer.Message(err) != want):
			t.Errorf("%s of %s: %v; want %s", sandbox, actor, err, want)
		}
		if err == nil {
			ends = append(ends, end)
		}
	}
	begin("a", "k1", "big", "")
	begin("a", "k1", "big", "")
	begin("a", "k2", "big", "sandbox a has 2 commands at once, which is the maximum")
	begin("b", "k1", "big", "")
	begin("c", "k1", "big", "k1 has 3 commands at once, which is the maximum")
	begin("c", "k2", "big", "")
	begin("d", "k3", "big", "tenant big has 4 commands at once, which is the maximum")
	begin("e", "k4", "small", "")
	begin("f", "k5", "other", "this server has 5 commands at once, which is the maximum")
	ends[0]()
	ends[0]() // once counts
	begin("a", "k1", "big", "")
	for _, end := range ends {
		end()
	}
	if u.total != 0 || len(u.sandboxes) != 0 || len(u.keys) != 0 || len(u.tenants) != 0 {
		t.Errorf("left: %+v", u)
	}
	for _, n := range []int{1024, 4096, 1 << 19} {
		x, s := DefaultExecs(n), DefaultStreams(n)
		if x.Sandbox < 100 || s.Sandbox < 100 || x.Total*execDescriptors+s.Total*streamDescriptors > n {
			t.Errorf("%d descriptors: %+v commands, %+v streams", n, x, s)
		}
	}
}

// What docs/reference/api.md says of how much may go on at once is what the code has.
func TestDocumentedBounds(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/api.md")
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("with 1,024 descriptors to %d and %d, with 8,192 or more to %d each", DefaultExecs(1024).Total, DefaultStreams(1024).Total, DefaultExecs(8192).Total)
	if !strings.Contains(string(page), want) || DefaultExecs(8192) != DefaultStreams(8192) || DefaultExecs(1<<20) != DefaultExecs(8192) {
		t.Errorf("docs/reference/api.md does not say %q", want)
	}
}

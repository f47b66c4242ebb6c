package composessh

import (
	"testing"

	"github.com/sand-boxer/sandboxer/adapters/composessh/composefile"
	"github.com/sand-boxer/sandboxer/internal/compattest"
)

func TestFormOfCompose(t *testing.T) {
	compattest.CheckForm(t, "compose-note", compattest.Shape("", meta{}))
	compattest.CheckSamples(t, "compose-note", meta{
		V: 1, Name: "sbx-0123456789abcdef-shop-g2", ID: "shop", Generation: 2, Owner: "0123456789abcdef", Service: "web", User: "1000:1000", Ports: []int{9090},
		Services: []composefile.Service{{Name: "web", Replicas: 1, OneShot: true, MayEnd: true, Restarts: 10, Healthy: true, Ports: []composefile.Port{{Target: 80, Published: 8080, Protocol: "tcp"}},
			Workspace: "/src", Volumes: map[string]string{"data": "/var/lib/data"}}},
		Notes: []string{"web: labels are left out"}, Volumes: []string{"data"}, Places: map[string]bool{"src": false, "src/file": true}, Quiesce: true, Agent: "6f1c0d",
	}, func(data []byte) (any, error) { return readMeta(data) }, "stamp")
}

package deptest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// methodFiles says in which file of an adapter each method of the contract is, so that two adapters can be compared file
// by file. CONTRIBUTING.md has the list of files.
var methodFiles = map[string]string{
	"Close": "extension.go", "Without": "extension.go",
	"Check": "provision.go", "Admit": "provision.go", "DefaultLimits": "provision.go", "Place": "provision.go", "Provision": "provision.go",
	"WaitReady": "ready.go",
	"Teardown":  "teardown.go", "Forget": "teardown.go",
	"Discover": "discover.go", "ListRunning": "discover.go",
	"IsAlive": "status.go", "Capacity": "status.go", "Stats": "status.go",
	"Exec": "exec.go", "Services": "exec.go",
	"Dial": "ports.go", "ListPorts": "ports.go",
	"Archive": "archive.go", "Unarchive": "archive.go",
	"Checkpoint": "checkpoint.go", "ProvisionFrom": "checkpoint.go",
	"Snapshot": "snapshot.go", "RestoreFromSnapshot": "snapshot.go", "DropSnapshot": "snapshot.go", "ListSnapshots": "snapshot.go",
	"Pause": "pause.go", "Resume": "pause.go", "Renew": "fuse.go",
	"Basis": "pool.go", "Claim": "pool.go",
	"SetNetwork": "network.go", "Notify": "notify.go",
	"Caches": "image.go", "PruneCaches": "image.go",
}

// elsewhere are the methods that an adapter has in another file, by adapter, each for a reason.
var elsewhere = map[string]map[string]string{
	"local": {
		"Notify":  "end.go",     // it waits for processes, and nothing else of that is in another adapter
		"Notices": "version.go", // no other adapter has it
	},
	"docker": {},
	"composessh": {
		"Without": "agent.go",                           // whether there are agents decides
		"Place":   "choose.go", "Capacity": "choose.go", // both ask all hosts
		"Caches": "images.go", "PruneCaches": "images.go", // images of several projects
		"Stats": "pause.go",
	},
	"vmpacker": {
		"Place": "place.go", "DefaultLimits": "vm.go",
		"Pause": "snapshot.go", "Resume": "snapshot.go", // the same commands of QEMU's
	},
}

func TestMethodsHaveTheirFiles(t *testing.T) {
	for adapter, other := range elsewhere {
		dir := filepath.Join(root(), "adapters", adapter)
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for _, f := range files {
			if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
				continue
			}
			src, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, f.Name()), nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range src.Decls {
				m, ok := d.(*ast.FuncDecl)
				if !ok || !m.Name.IsExported() || typeOf(m) != "extension" {
					continue
				}
				seen[m.Name.Name] = true
				want, excepted := other[m.Name.Name]
				if !excepted {
					want = methodFiles[m.Name.Name]
				}
				switch {
				case want == "":
					t.Errorf("adapters/%s: %s has no file: give it one in the table of this test", adapter, m.Name.Name)
				case want != f.Name():
					t.Errorf("adapters/%s: %s is in %s; want it in %s", adapter, m.Name.Name, f.Name(), want)
				case excepted && methodFiles[m.Name.Name] == want:
					t.Errorf("adapters/%s: %s is no exception", adapter, m.Name.Name)
				}
			}
		}
		for name := range other {
			if !seen[name] {
				t.Errorf("adapters/%s has no method %s, which is an exception of this test", adapter, name)
			}
		}
		for _, name := range []string{"Provision", "WaitReady", "Teardown"} {
			if !seen[name] {
				t.Errorf("adapters/%s has no method %s of a type extension", adapter, name)
			}
		}
	}
}

// typeOf is the name of the type that a method is of, empty for a function.
func typeOf(f *ast.FuncDecl) string {
	if f.Recv == nil || len(f.Recv.List) != 1 {
		return ""
	}
	typ := f.Recv.List[0].Type
	if p, ok := typ.(*ast.StarExpr); ok {
		typ = p.X
	}
	name, _ := typ.(*ast.Ident)
	if name == nil {
		return ""
	}
	return name.Name
}

// Package composefile reads untrusted compose files. It accepts a closed list of keys and
// values. It refuses everything else, and everything that would let a service reach its
// host, with file, line and reason. A host never gets the file that was read, but another
// one that Render writes from the model.
//
//	p, err := composefile.Load(ctx, dir, composefile.Options{Env: env})
//	text, err := p.Render(composefile.Rendering{Name: "sbx-1", Dir: "/srv/sbx-1", …})
//
// Nothing outside dir is read, whatever links lead there, and neither the environment
// nor the home directory of this process counts.
//
// The decision is made on the model that compose-go makes, after variables were
// replaced, anchors followed and extends merged. A field of that model which is set and
// not on the list is refused: additions of later versions of the format are refused until
// they are on the list.
package composefile

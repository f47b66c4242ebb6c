// Package composefile reads compose files that nobody vouches for. What it accepts is
// a closed list; all else, and all that would let a service reach the host it runs on,
// is refused with file, line and reason. What a host is given is never the file that
// was read but another one, written from the model by Render.
//
//	p, err := composefile.Load(ctx, dir, composefile.Options{Env: env})
//	text, err := p.Render(composefile.Rendering{Name: "sbx-1", Dir: "/srv/sbx-1", …})
//
// Nothing outside dir is read, whatever links lead there, and neither the environment
// nor the home directory of this process counts.
//
// Accepting is decided on the model that compose-go makes, after variables were
// replaced, anchors followed and extends merged. A field of that model which is set and
// not on the list is refused: what a later version of the format adds is refused until
// somebody has thought about it.
package composefile

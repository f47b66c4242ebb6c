package catalog

import (
	"reflect"

	"github.com/sand-boxer/sandboxer"
)

// DecodeConfig reads a configuration that comes without its file, as a JSON object that contains the values of
// secrets, into v, as Env.Decode reads a `config:` block. It fails with Faults, whose paths begin with "config".
func DecodeConfig(data []byte, v any) error {
	p := reflect.ValueOf(v)
	if p.Kind() != reflect.Pointer || p.IsNil() {
		return sandboxer.E(sandboxer.Internal, nil, "a configuration can only be read into a pointer, not %T", v)
	}
	src := newSource("config", data)
	if n := src.parse(data); n != nil {
		d := newDecoder(src)
		d.secret, d.resolved = func(value string) (sandboxer.Secret, error) { return sandboxer.Secret(value), nil }, true
		d.value(p.Elem(), n, nil, "config", rule{}, 1)
	}
	if fs := src.take(); len(fs) > 0 {
		return fs
	}
	return nil
}

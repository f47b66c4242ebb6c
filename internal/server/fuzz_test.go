package server

import (
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"testing"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/api"
)

// Whatever a body holds, it is decoded whole or refused as Invalid; what is decoded
// says the same when it is encoded again.
func FuzzDecodeJSON(f *testing.F) {
	s := New(nil, Options{})
	reg := s.api.OpenAPI().Components.Schemas
	var types []reflect.Type
	for _, e := range examples() {
		for _, t := range s.types {
			if t.in == reflect.TypeOf(e) {
				types = append(types, t.in)
				b, _ := json.Marshal(e)
				f.Add(uint8(len(types)-1), b)
			}
		}
	}
	f.Add(uint8(0), []byte(`{"profile":"x","ttl":"1h","mounts":[{"source":"/a","target":"/b","x":1}]}`))
	f.Add(uint8(0), []byte(`{"profile":"x","max_cost":"-0.0000001"}`))
	f.Fuzz(func(t *testing.T, n uint8, body []byte) {
		typ := types[int(n)%len(types)]
		schema := reg.Schema(typ, true, "")
		v := reflect.New(typ)
		if err := decodeJSON(body, reg, schema, v.Interface()); err != nil {
			if !errors.Is(err, sandboxer.Invalid) {
				t.Errorf("%s: %v", body, err)
			}
			return
		}
		out, err := json.Marshal(v.Interface())
		if err != nil {
			t.Fatalf("%s: %v", body, err)
		}
		again := reflect.New(typ)
		if err := decodeJSON(out, reg, schema, again.Interface()); err != nil {
			t.Errorf("%s was taken and came back as %s, which is not: %v", body, out, err)
		}
	})
}

// No control message of a client breaks the stream's bookkeeping.
func FuzzExecControl(f *testing.F) {
	f.Add(byte(api.ChanResize), []byte(`{"cols":80,"rows":24}`))
	f.Add(byte(api.ChanSignal), []byte("TERM"))
	f.Add(byte(api.ChanStdinEOF), []byte{})
	f.Add(byte(api.ChanCancel), []byte{})
	f.Add(byte(99), []byte("x"))
	f.Fuzz(func(t *testing.T, channel byte, p []byte) {
		x := &execution{resize: make(chan sandboxer.WinSize, 1), signals: make(chan os.Signal, 1), cancel: func(error) {}}
		x.stdin.changed.L = &x.stdin.mu
		for range 3 {
			if err := x.control(channel, p); err != nil && !errors.Is(err, sandboxer.Invalid) {
				t.Errorf("channel %d, %q: %v", channel, p, err)
			}
		}
		select {
		case size := <-x.resize:
			if size.Cols == 0 || size.Rows == 0 {
				t.Errorf("%q became the size %v", p, size)
			}
		default:
		}
	})
}

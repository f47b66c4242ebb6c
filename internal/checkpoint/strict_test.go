package checkpoint

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/sand-boxer/sandboxer"
)

// TestStrict: what is kept and carried about is read as it was meant or not at all: no
// name in another case, none given twice.
func TestStrict(t *testing.T) {
	m := directories(3)
	data, err := m.encode()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := decodeManifest(data); err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{
		`"id":"large"`:        `"ID":"large"`,
		`"kind":"portable"`:   `"kind":"portable","kind":"portable"`,
		`"payload":`:          `"Payload":`,
		`"path":"0000001"`:    `"Path":"0000001"`,
		`"path":"0000002"`:    `"path":"0000001","path":"0000002"`,
		`"format"`:            `"format":"` + Format + `","\u0066ormat"`,
		`"type":"dir"`:        `"type":"dir","more":1`,
		`"quiesced":false`:    `"quiesced":false,"quiesceD":true`,
		`"digest":"blake3:00`: `"digeſt":"","digest":"blake3:00`, // which folds to digest
	} {
		bad := bytes.Replace(data, []byte(from), []byte(to), 1)
		if bytes.Equal(bad, data) {
			t.Errorf("there is no %s in %s", from, data)
		}
		_, err := decodeManifest(bad)
		if sandboxer.KindOf(err) != sandboxer.Invalid {
			t.Errorf("%s for %s: %v", to, from, err)
		}
	}
	if _, err := decodeManifest(append(bytes.Clone(data), "{}"...)); sandboxer.KindOf(err) != sandboxer.Invalid {
		t.Errorf("with more behind it: %v", err)
	}

	s := newStore(t, newDir(t), Options{})
	rec, err := json.Marshal(record{Format: recordFormat, ID: "x"})
	if err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{`"ID":"x"`, `"id":"x","id":"x"`} {
		bad := bytes.Replace(rec, []byte(`"id":"x"`), []byte(to), 1)
		if _, err := s.decodeRecord("x", bad); err == nil || bytes.Equal(bad, rec) || !bytes.Contains([]byte(err.Error()), []byte("cannot be read")) {
			t.Errorf("a record with %s: %v", to, err)
		}
	}
}

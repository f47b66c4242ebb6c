package manager

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// macPrefix begins a digest that is kept; older ones have none.
const macPrefix = "hmac-"

// mac is what is kept of a digest. The environment of the request is in it, which nobody
// who reads the database shall be able to guess: it is made with the installation's key.
func (m *Manager) mac(digest string) string {
	return macPrefix + hex.EncodeToString(keyedDigest(m.opts.Key, "sandboxer idempotency", []byte(digest)))
}

// keyedDigest digests data with the installation's key, for one purpose: who reads the digest
// cannot try what it is of.
func keyedDigest(key []byte, purpose string, data []byte) []byte {
	derived := hmac.New(sha256.New, key)
	derived.Write([]byte(purpose))
	mac := hmac.New(sha256.New, derived.Sum(nil))
	mac.Write(data)
	return mac.Sum(nil)
}

// digestMatches reports whether what was kept, perhaps by an older version, is of the request with
// this digest.
func (m *Manager) digestMatches(kept, digest string) bool {
	if !strings.HasPrefix(kept, macPrefix) {
		kept = m.mac(kept)
	}
	return hmac.Equal([]byte(kept), []byte(digest))
}

// digest identifies a request under an idempotency key. What says how to answer, not
// what to make, does not count.
func digest(req sandboxer.CreateRequest) string { return digestOf("", req) }

// restoreDigest is digest for a restore of one snapshot.
func restoreDigest(snapshot string, req RestoreRequest) string {
	return digestOf(snapshot+"\x00", req)
}

// forkDigest is digest for a fork of one sandbox.
func forkDigest(sandbox string, req ForkRequest) string {
	return digestOf("fork\x00"+sandbox+"\x00", req)
}

// digestOf digests what is said of what is asked for, and the request. Digests are kept for
// a day, and those of former builds must be found again: they are made of a form that wrote
// durations as nanoseconds, under names that said so, and money as a number.
func digestOf(what string, req any) string {
	v := reflect.ValueOf(req)
	fields := reflect.VisibleFields(v.Type())
	for i, f := range fields {
		if f.Type == reflect.TypeFor[time.Duration]() {
			name, opts, _ := strings.Cut(f.Tag.Get("json"), ",")
			fields[i].Tag = reflect.StructTag(fmt.Sprintf("json:%q", name+"_ns,"+opts))
		}
	}
	j, err := json.Marshal(v.Convert(reflect.StructOf(fields)).Interface()) // sorts maps; Key and NoWaiting have no JSON
	if err != nil {
		panic(err) // plain data always encodes
	}
	sum := sha256.Sum256(append([]byte(what), j...))
	return hex.EncodeToString(sum[:])
}

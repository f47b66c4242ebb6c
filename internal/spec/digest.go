package spec

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// createDigest identifies a request under an idempotency key. Fields that say how to answer, not
// what to make, do not count.
func createDigest(req sandboxer.CreateRequest) string { return digestOf("", req) }

// restoreDigest is digest for a restore of one snapshot.
func restoreDigest(snapshot string, req sandboxer.RestoreRequest) string {
	return digestOf(snapshot+"\x00", req)
}

// ForkDigest is digest for a fork of one sandbox.
func ForkDigest(sandbox string, req sandboxer.ForkRequest) string {
	return digestOf("fork\x00"+sandbox+"\x00", req)
}

// digestOf digests the request together with what, which describes it. Digests are kept for a day, and a new build must compute
// those of a former one. So the form is fixed: durations as nanoseconds under the names of that time, and money as a number.
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

// Package api is the public interface of sandboxer: the JSON types of the REST interface, a client for
// it, and its committed description (openapi.yaml).
//
// The types here are a promise to other programs and change only compatibly within /v1; package
// sandboxer's own types may change with the program. Durations are Go duration strings ("30m",
// "1h30m"), money is a decimal string of credits ("0.12"), sizes are bytes, times are RFC 3339 in UTC.
// Lists are {"items": …, "next_cursor": …}. Values of environment variables are accepted and never
// returned.
package api

import _ "embed"

// SchemaVersion is the version of this package's JSON documents. Documents that people keep carry it
// (sandboxes, plans, lists, status). It changes only with a new major version of the interface.
const SchemaVersion = 1

// OpenAPI is the OpenAPI 3.1 description of the interface, as served at
// /openapi.yaml.
//
//go:embed openapi.yaml
var OpenAPI []byte

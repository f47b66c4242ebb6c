package api

import (
	"cmp"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// Key is the record of one API key.
type Key = sandboxer.APIKey

// CreatedKey carries a new API key. Token is shown only this one time.
type CreatedKey struct {
	Token string `json:"token" example:"sbx_key_k1_…"`
	Key   Key    `json:"key"`
}

// Secret describes a secret. Its value is never returned.
type Secret struct {
	Name      string    `json:"name" example:"registry-token"`
	Version   int64     `json:"version" example:"2" doc:"The newest one"`
	Versions  int       `json:"versions" example:"1" doc:"How many versions are kept: older ones as long as a sandbox or a snapshot needs them"`
	CreatedAt time.Time `json:"created_at" doc:"When the newest version was set"`
}

// NewSecret converts r to its public form.
func NewSecret(r sandboxer.SecretRecord) Secret {
	return Secret{Name: r.Name, Version: r.Version, Versions: r.Versions, CreatedAt: r.CreatedAt}
}

// SetSecret carries the value of a secret.
type SetSecret struct {
	Value string `json:"value" example:"…" doc:"Text of 1 to 65536 bytes without NUL"`
}

// SecretUse is the secret that a sandbox has in an environment variable.
type SecretUse struct {
	Name    string `json:"name" example:"registry-token"`
	Version int64  `json:"version" example:"2" doc:"The one that it was created with"`
}

// Balance is a tenant's balance.
type Balance struct {
	Tenant  string  `json:"tenant" example:"default"`
	Balance Credits `json:"balance" example:"10.00"`
}

// Quota is a tenant's quota and its use.
type Quota struct {
	Tenant    string          `json:"tenant" example:"default"`
	Resources []QuotaResource `json:"resources" nullable:"false"`
}

// QuotaResource is a tenant's quota and use of one resource.
type QuotaResource struct {
	Resource sandboxer.Resource `json:"resource" enum:"sandboxes,disk,images,snapshots,snapshot_bytes,execs,requests,spend_month,spend_day" example:"sandboxes"`
	Used     int64              `json:"used" example:"3" doc:"disk and snapshot_bytes in bytes; requests in the last minute, counted only where they are bounded; spend_month and spend_day in millionths of a credit"`
	Limit    *int64             `json:"limit,omitempty" example:"20" doc:"Absent: not bounded"`
}

// QuotaQuery selects tenants; without fields it selects the caller's.
type QuotaQuery struct {
	Tenant string
	All    bool // every tenant, for administrators
	Cursor string
	Limit  int
}

// Grant adds credits to a tenant. Two grants under one key count once.
type Grant struct {
	Tenant string  `json:"tenant" example:"default"`
	Amount Credits `json:"amount" example:"10.00"`
	Key    string  `json:"key" example:"invoice-2026-11" doc:"Operation key, unique for ever"`
	Note   string  `json:"note,omitempty"`
}

// Entry is one immutable line of the ledger.
type Entry struct {
	Key        string              `json:"key"`
	Tenant     string              `json:"tenant"`
	SandboxID  string              `json:"sandbox_id,omitempty"`
	Generation int                 `json:"generation,omitempty"`
	Type       sandboxer.EntryType `json:"type" example:"hold"`
	Amount     Credits             `json:"amount" example:"-0.12"`
	Note       string              `json:"note,omitempty"`
	At         time.Time           `json:"at"`
	KeyID      string              `json:"key_id,omitempty" doc:"API key that made a hold"`
}

// NewEntry converts e to its public form.
func NewEntry(e sandboxer.Entry) Entry {
	return Entry{Key: e.Key, Tenant: e.Tenant, SandboxID: cmp.Or(e.ShownID, e.SandboxID), Generation: e.Generation,
		Type: e.Type, Amount: Credits(e.Amount), Note: e.Note, At: e.At, KeyID: e.KeyID}
}

package manager

import (
	"context"
	"io"
	"io/fs"
	"iter"
	"net"

	"github.com/sand-boxer/sandboxer"
)

func (m *Manager) Start(ctx context.Context) error { return unbuilt() }
func (m *Manager) Close() error                    { return nil }
func New(store sandboxer.Store, profiles []sandboxer.Profile, exts []Extension, opts Options) (*Manager, error) {
	return nil, unbuilt()
}
func (m *Manager) Create(ctx context.Context, req sandboxer.CreateRequest) (*sandboxer.Sandbox, error) {
	return nil, unbuilt()
}
func (m *Manager) Plan(ctx context.Context, req sandboxer.CreateRequest) (Plan, error) {
	return Plan{}, unbuilt()
}
func (m *Manager) Get(ctx context.Context, ref string) (*sandboxer.Sandbox, error) {
	return nil, unbuilt()
}
func (m *Manager) List(ctx context.Context, q sandboxer.Query) ([]*sandboxer.Sandbox, string, error) {
	return nil, "", unbuilt()
}
func (m *Manager) Wait(ctx context.Context, ref string, states ...sandboxer.State) (*sandboxer.Sandbox, error) {
	return nil, unbuilt()
}
func (m *Manager) Extend(ctx context.Context, ref string, e Extend) (*sandboxer.Sandbox, error) {
	return nil, unbuilt()
}
func (m *Manager) Destroy(ctx context.Context, ref string) (*sandboxer.Sandbox, error) {
	return nil, unbuilt()
}
func (m *Manager) Exec(ctx context.Context, ref string, cmd sandboxer.Cmd) (sandboxer.Exit, error) {
	return sandboxer.Exit{}, unbuilt()
}
func (m *Manager) ReadFile(ctx context.Context, ref, name string) (io.ReadCloser, error) {
	return nil, unbuilt()
}
func (m *Manager) WriteFile(ctx context.Context, ref, name string, mode fs.FileMode, r io.Reader) error {
	return unbuilt()
}
func (m *Manager) StatFile(ctx context.Context, ref, name string) (sandboxer.FileInfo, error) {
	return sandboxer.FileInfo{}, unbuilt()
}
func (m *Manager) ListFiles(ctx context.Context, ref, dir string) iter.Seq2[sandboxer.FileInfo, error] {
	return func(yield func(sandboxer.FileInfo, error) bool) { yield(sandboxer.FileInfo{}, unbuilt()) }
}
func (m *Manager) MakeDir(ctx context.Context, ref, dir string) error       { return unbuilt() }
func (m *Manager) MoveFile(ctx context.Context, ref, from, to string) error { return unbuilt() }
func (m *Manager) RemoveFile(ctx context.Context, ref, name string) error   { return unbuilt() }
func (m *Manager) Dial(ctx context.Context, ref string, port int) (net.Conn, error) {
	return nil, unbuilt()
}
func (m *Manager) Stats(ctx context.Context, ref string) (sandboxer.Stats, error) {
	return sandboxer.Stats{}, unbuilt()
}
func (m *Manager) Events(ctx context.Context, q sandboxer.EventQuery) ([]sandboxer.Event, error) {
	return nil, unbuilt()
}
func (m *Manager) Follow(ctx context.Context, q sandboxer.EventQuery) iter.Seq2[sandboxer.Event, error] {
	return func(yield func(sandboxer.Event, error) bool) { yield(sandboxer.Event{}, unbuilt()) }
}
func (m *Manager) Profiles(ctx context.Context) []sandboxer.Profile         { return nil }
func (m *Manager) Extensions(ctx context.Context) []sandboxer.ExtensionInfo { return nil }
func (m *Manager) Probe(ctx context.Context, extension string) (sandboxer.Offer, error) {
	return sandboxer.Offer{}, unbuilt()
}
func (m *Manager) Balance(ctx context.Context, tenant string) (sandboxer.Credits, error) {
	return 0, unbuilt()
}
func (m *Manager) Grant(ctx context.Context, tenant string, amount sandboxer.Credits, key, note string) error {
	return unbuilt()
}
func (m *Manager) Entries(ctx context.Context, q sandboxer.EntryQuery) ([]sandboxer.Entry, string, error) {
	return nil, "", unbuilt()
}
func (m *Manager) CreateKey(ctx context.Context, k NewKey) (sandboxer.Secret, sandboxer.APIKey, error) {
	return "", sandboxer.APIKey{}, unbuilt()
}
func (m *Manager) Keys(ctx context.Context) ([]sandboxer.APIKey, error) { return nil, unbuilt() }
func (m *Manager) RevokeKey(ctx context.Context, id string) error       { return unbuilt() }
func (m *Manager) Authenticate(ctx context.Context, token sandboxer.Secret) (sandboxer.Principal, error) {
	return sandboxer.Principal{}, unbuilt()
}
func (m *Manager) Bind(ctx context.Context, p sandboxer.Principal) (context.Context, context.CancelFunc) {
	return context.WithCancel(ctx)
}
func (m *Manager) Audit(ctx context.Context) (Audit, error)       { return Audit{}, unbuilt() }
func (m *Manager) Sweep(ctx context.Context) (SweepReport, error) { return SweepReport{}, unbuilt() }

func unbuilt() error { return sandboxer.E(sandboxer.Unsupported, nil, "not built yet") }

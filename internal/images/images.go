// Package images brings OCI images to this machine: it pulls them from registries
// into a store shared by all sandboxes, and flattens their layers into one tree.
//
// A registry's answer is trusted only as far as a digest proves it. Everything is
// bounded before it is fetched or unpacked, and refused with the reason.
//
// Below the store's directory:
//
//	blobs/<sha256>     layers, verified; of images of the public, <sha256>.public
//	partial/<sha256>   layers that are being fetched, or were when a broker died
//	refs/<digest>      what references stood for when they were last asked about
//	<key>.erofs        images ready to run; made and named by the caller
//	<key>.sum          what the caller knows them by
//	<key>.tmp/         where one is being made
//	lock, <key>.lock   see Hold and Lock
package images

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/filelock"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
	"github.com/sand-boxer/sandboxer/internal/wholefile"
)

// The values of Settings.Pull: when a registry is asked about a tag. A digest is asked about only if its image is not here.
const (
	Missing = "missing" // if the tag is not known here
	Always  = "always"  // on every create
	Never   = "never"   // not even for a digest
)

// Access says on whose authority an image is pulled, and so what may be reached and read for
// it. The results of one access do not exist for the other: neither what a
// reference stands for, nor a layer, nor what the caller made of them. Otherwise any caller that can
// name a private image, or a layer of one, could read it.
type Access string

const (
	// Public is for every caller that may ask: without credentials, only what everybody could
	// read, from public addresses. It is the zero value.
	Public Access = ""
	// Operator is for an administrator, a profile or a registry that the settings list:
	// with the credentials of the user who runs the server, from any address.
	Operator Access = "operator"
)

// Settings are the registry settings in adapters' configuration.
type Settings struct {
	Pull       string              `yaml:"pull" json:"pull,omitempty" enum:"missing,always,never" help:"When a registry is asked which image a tag means; a digest is looked up only if its image is not present."`
	Registries []string            `yaml:"registries" json:"registries,omitempty" help:"The only registries to pull from, as host[:port], with the server's credentials for everybody. Empty means that administrators can pull from any registry, others only anonymously from public ones."`
	Insecure   []string            `yaml:"insecure" json:"insecure,omitempty" help:"Registries that may speak plain HTTP, as host[:port]; those on loopback always may."`
	Mirrors    map[string][]string `yaml:"mirrors" json:"mirrors,omitempty" help:"Hosts that are asked first, by registry."`
}

// Options configure a store. All bounds must be given.
type Options struct {
	Settings
	Keep   int64 // bytes of the store beyond which what was not used for longest is removed
	Limits Limits

	// InUse names the images, as <key>.erofs, that must stay.
	InUse func() (map[string]bool, error)
	// Reach reports whether a pull with public access may connect to an address. It must
	// refuse everything that is not on the public internet.
	Reach func(netip.Addr) bool

	stall time.Duration // a connection without a byte for so long is broken
	retry time.Duration // before the second attempt; doubled from there on
}

// Limits bound one image, against broken and hostile ones.
type Limits struct {
	Download int64 // bytes of its layers as they are fetched
	Unpacked int64 // bytes of its layers unpacked, and of its files
	Entries  int   // files, directories and links in all layers
}

const (
	maxManifest = 4 << 20 // what the distribution specification asks of registries
	maxConfig   = 8 << 20
	maxLayers   = 512
)

// A Store has the images of one extension on this machine. Several processes may use
// one directory.
type Store struct {
	dir  string
	opts Options

	http   *http.Transport // as Operator
	public *http.Transport // connects to where Options.Reach allows, and nowhere else

	mu       sync.Mutex
	sessions map[string]*session
}

// New returns the store in dir, making it.
func New(dir string, opts Options) (*Store, error) {
	if opts.stall == 0 {
		opts.stall = 30 * time.Second
	}
	if opts.retry == 0 {
		opts.retry = 100 * time.Millisecond
	}
	s := &Store{dir: dir, opts: opts, sessions: map[string]*session{}}
	for _, d := range []string{dir, s.path("blobs"), s.path("partial"), s.path("refs")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	s.http, s.public = newTransport(opts.stall, nil), newTransport(opts.stall, s.reach)
	s.public.Proxy = nil // it would choose the address
	return s, nil
}

func newTransport(stall time.Duration, control func(network, address string, _ syscall.RawConn) error) *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.DialContext = (&net.Dialer{Timeout: 15 * time.Second, Control: control}).DialContext
	t.ResponseHeaderTimeout = stall
	t.MaxIdleConnsPerHost = parallel
	t.IdleConnTimeout = 15 * time.Second
	return t
}

// reach refuses a connection to an address that is not public, just before it is made:
// what a name leads to is not known earlier.
func (s *Store) reach(_, address string, _ syscall.RawConn) error {
	to, err := netip.ParseAddrPort(address)
	if err != nil || !s.opts.Reach(to.Addr().Unmap()) {
		return errNotPublic
	}
	return nil
}

var errNotPublic = errors.New("the address is not public")

// Close closes connections. The data on disk stays.
func (s *Store) Close() {
	s.http.CloseIdleConnections()
	s.public.CloseIdleConnections()
}

// Access is the access for a caller: vouched says that an administrator or a profile names
// the image. An operator who lists registries vouches for them.
func (s *Store) Access(vouched bool) Access {
	if vouched || len(s.opts.Registries) > 0 {
		return Operator
	}
	return Public
}

// Limits returns the bounds of one image.
func (s *Store) Limits() Limits { return s.opts.Limits }

func (s *Store) path(elem ...string) string {
	return filepath.Join(append([]string{s.dir}, elem...)...)
}

// parse reads a reference to an image of a registry, and says what is wrong with it.
func (s *Store) parse(ref string, access Access) (name.Reference, error) {
	r, err := name.ParseReference(ref)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "image %q is not a reference to an image", ref).
			WithHint("write registry/name:tag, registry/name@sha256:…, dir:/root/directory, oci:/layout[:tag] or tar:/saved.tar")
	}
	host := r.Context().RegistryStr()
	if h, _ := splitHost(host); h == "invalid" || strings.HasSuffix(h, ".invalid") {
		return nil, sandboxer.E(sandboxer.Invalid, nil, "image %q: %s can never exist", ref, h)
	}
	if len(s.opts.Registries) > 0 && !slices.ContainsFunc(s.opts.Registries, func(a string) bool { return hostName(a) == host }) {
		return nil, sandboxer.E(sandboxer.Denied, nil, "image %q: this extension takes images from %s only", ref, strings.Join(s.opts.Registries, ", ")).
			WithHint("an operator can add %s to images.registries of the extension", shown(host))
	}
	if access != Operator && !s.looksPublic(host) {
		return nil, sandboxer.E(sandboxer.Denied, nil, "image %q: %s is not a registry on the public internet", ref, shown(host)).
			WithHint("an administrator can use it, or name it in a profile or in images.registries of the extension")
	}
	return r, nil
}

// looksPublic reports whether host, as it is written, could be on the public internet.
// The address of a name is checked when it is dialled.
func (s *Store) looksPublic(host string) bool {
	h, _ := splitHost(host)
	if ip, err := netip.ParseAddr(h); err == nil {
		return s.opts.Reach(ip.Unmap())
	}
	return !isLoopback(host)
}

// Check says what is wrong with a reference, without any request. Kinds: Invalid;
// Denied.
func (s *Store) Check(ref string, access Access) error {
	_, err := s.parse(ref, access)
	return err
}

// hostName is go-containerregistry's name of a registry; shown is the usual one.
func hostName(host string) string {
	if host == "docker.io" {
		return name.DefaultRegistry
	}
	return host
}

func shown(host string) string {
	if host == name.DefaultRegistry {
		return "docker.io"
	}
	return host
}

// An Image is what a reference stands for on this machine's platform. Its layers may
// not be here yet.
type Image struct {
	Ref      string // as asked for
	Digest   string // of the manifest
	Config   *v1.ConfigFile
	ConfigID string // digest of the configuration, which covers the layers' content
	Raw      []byte // Config, as the registry has it

	manifest *v1.Manifest
	ref      name.Reference
	access   Access
}

// Pinned is the reference with the digest: the same image for ever.
func (img *Image) Pinned() string {
	repo := img.ref.Context()
	return shown(repo.RegistryStr()) + "/" + repo.RepositoryStr() + "@" + img.Digest
}

// known is a file in refs.
type known struct {
	Ref      string `json:"ref"`
	Digest   string `json:"digest"` // of the image's manifest
	Manifest []byte `json:"manifest"`
	Config   []byte `json:"config"`
}

func (s *Store) refFile(ref name.Reference, access Access) string {
	sum := sha256.Sum256([]byte(ref.Name()))
	return s.path("refs", hex.EncodeToString(sum[:])+access.suffix())
}

// suffix distinguishes the files of the two accesses. Files without one, from before there were two, were
// pulled as Operator.
func (a Access) suffix() string {
	if a == Operator {
		return ""
	}
	return ".public"
}

func (s *Store) remember(ref name.Reference, access Access, k known) error {
	k.Ref = ref.Name()
	data, err := json.Marshal(k)
	if err != nil {
		return err
	}
	return wholefile.Write(s.refFile(ref, access), data)
}

// recall returns what ref stood for when it was last asked about; nil if never.
func (s *Store) recall(ref name.Reference, access Access) *known {
	data, err := os.ReadFile(s.refFile(ref, access))
	var k known
	if err == nil {
		_, err = strictjson.DecodeStored(data, &k)
	}
	if err != nil || k.Ref != ref.Name() ||
		digestOf(k.Manifest) != k.Digest {
		return nil
	}
	touch(s.refFile(ref, access))
	return &k
}

// Find returns the image that ref stands for, asking its registry as the policy says.
// Kinds: Invalid, Denied; Failed for an image that does not exist, may not be
// read, is not for this platform or broken; Unavailable for a registry that does not
// answer.
func (s *Store) Find(ctx context.Context, ref string, access Access) (*Image, error) {
	r, err := s.parse(ref, access)
	if err != nil {
		return nil, err
	}
	_, pinned := r.(name.Digest)
	k := s.recall(r, access)
	if k == nil || s.opts.Pull == Always && !pinned {
		if s.opts.Pull == Never {
			return nil, sandboxer.E(sandboxer.Failed, nil, "image %q is not on this machine, and images.pull is never", ref)
		}
		if k, err = s.ask(ctx, ref, r, access); err != nil {
			return nil, err
		}
	}
	img, err := readImage(k)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Failed, err, "image %q cannot be used: %v", ref, err)
	}
	img.Ref, img.ref, img.access = ref, r, access
	return img, s.admit(img)
}

// admit refuses an image that is too large or not for this machine.
func (s *Store) admit(img *Image) error {
	if os, arch := img.Config.OS, img.Config.Architecture; os != "" && os != "linux" || arch != "" && arch != goarch {
		return sandboxer.E(sandboxer.Failed, nil, "image %q is for %s/%s; this machine runs linux/%s", img.Ref, os, arch, goarch)
	}
	var size int64
	for _, l := range img.manifest.Layers {
		size += l.Size
	}
	if size > s.opts.Limits.Download {
		return sandboxer.E(sandboxer.Failed, nil, "image %q is a download of %s; the limit is %s", img.Ref, bytesText(size), bytesText(s.opts.Limits.Download)).
			WithHint("an operator can raise images.max_download of the extension")
	}
	return nil
}

// readImage checks that a registry's answer about an image is consistent.
func readImage(k *known) (*Image, error) {
	m, err := v1.ParseManifest(strings.NewReader(string(k.Manifest)))
	if err != nil {
		return nil, fmt.Errorf("its manifest cannot be read: %w", err)
	}
	if got := digestOf(k.Config); got != m.Config.Digest.String() {
		return nil, fmt.Errorf("its configuration has the digest %s, its manifest says %s", got, m.Config.Digest)
	}
	cf, err := v1.ParseConfigFile(strings.NewReader(string(k.Config)))
	if err != nil {
		return nil, fmt.Errorf("its configuration cannot be read: %w", err)
	}
	switch {
	case len(m.Layers) == 0 || len(cf.RootFS.DiffIDs) == 0:
		return nil, errors.New("it has no layers: it is not an image that can run")
	case len(m.Layers) != len(cf.RootFS.DiffIDs):
		return nil, fmt.Errorf("its manifest has %d layers, its configuration %d", len(m.Layers), len(cf.RootFS.DiffIDs))
	case len(m.Layers) > maxLayers:
		return nil, fmt.Errorf("it has %d layers; the limit is %d", len(m.Layers), maxLayers)
	}
	for i, l := range m.Layers {
		if l.Size < 0 || !isSHA256(l.Digest) || !isSHA256(cf.RootFS.DiffIDs[i]) {
			return nil, fmt.Errorf("layer %d has no proper size and digest", i+1)
		}
	}
	return &Image{Digest: k.Digest, Config: cf, ConfigID: m.Config.Digest.String(), Raw: k.Config, manifest: m}, nil
}

func isSHA256(h v1.Hash) bool {
	_, err := hex.DecodeString(h.Hex)
	return h.Algorithm == "sha256" && len(h.Hex) == 64 && err == nil
}

func digestOf(data []byte) string {
	sum := sha256.Sum256(data)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// Hold keeps everything in the store from being removed, by any process, until it is
// released: from before an image is looked up until a record says that it is in use.
func (s *Store) Hold(ctx context.Context) (done func(), err error) {
	l, err := filelock.Take(ctx, s.path("lock"), filelock.Shared)
	if err != nil {
		return nil, err
	}
	return l.Release, nil
}

// Lock excludes all other callers from making the image called key.
func (s *Store) Lock(ctx context.Context, key string) (unlock func(), err error) {
	l, err := filelock.Take(ctx, s.path(key+".lock"), filelock.Exclusive) // its file is removed by Prune
	if err != nil {
		return nil, err
	}
	return l.Release, nil
}

// SumSuffix ends the name of the file that goes with an image's and is removed with it.
const SumSuffix = ".sum"

func bytesText(n int64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 10<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 10<<10:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d bytes", n)
}

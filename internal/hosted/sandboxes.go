package hosted

import (
	"cmp"
	"context"
	"encoding/json"
	"iter"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// Sandboxes are the sandboxes of one extension at a hosted service. An adapter embeds it and gets Teardown, IsAlive, Discover,
// ListRunning, Forget and Credential. The service finds a sandbox by its tags: owner, extension, ID, generation, attempt and
// fuse. The ctx of each function says for which account it is called (Account); an adapter makes its own calls for a handle
// with For(ctx, h.Credential).
//
// Before a create, Make writes the note <id>.g<generation>: something may exist from now on. After the create, the note has the
// name that the service chose. If the answer is missing and the listing may still lag, no sandbox counts as absent.
type Sandboxes struct {
	Env    sandboxer.Env
	Keys   *Keys
	Settle time.Duration // how long the listing may lag behind a create

	// List yields the sandboxes that have all these tags. The listing may lag; Get tells whether a sandbox exists.
	List func(ctx context.Context, tags map[string]string) iter.Seq2[Object, error]
	// Get returns the sandbox of a name. Kind: NotFound if it does not exist.
	Get func(ctx context.Context, ref string) (Object, error)
	// Delete removes the sandbox of a name. Kind: NotFound if it does not exist.
	Delete func(ctx context.Context, ref string) error
}

// An Object is a sandbox as the service knows it.
type Object struct {
	Ref  string // the service's name for it
	Tags map[string]string
	Down bool // it exists, and does not work

	account sandboxer.SecretRef // in which it was found
}

// prefix begins the names of our tags.
const prefix = "sandboxer-"

const (
	tagFuse    = prefix + "fuse"
	tagAttempt = prefix + "attempt" // when it was asked for, by our clock: two objects of one sandbox can be told apart
)

// FuseTag returns the tag that keeps a fuse, by our clock. The service itself gets a lifetime instead, since its clock may
// differ.
func FuseTag(fuse time.Time) map[string]string {
	return map[string]string{tagFuse: fuse.Format(time.RFC3339Nano)}
}

// CheckLife refuses, as Unsupported, a sandbox that must live longer than the service allows.
func CheckLife(spec sandboxer.Spec, longest time.Duration) error {
	needs := time.Until(spec.Fuse)
	if spec.Fuse.IsZero() || needs <= longest {
		return nil
	}
	return sandboxer.Untouched(sandboxer.E(sandboxer.Unsupported, nil, "the service ends a sandbox after %s; this one needs %s, which includes the time for its removal",
		sandboxer.FormatDuration(longest), sandboxer.FormatDuration(needs.Round(time.Second))).WithHint("ask for a shorter time to live: --ttl"))
}

// Refuse refuses, as Unsupported, a request for something that a sandbox of the extension cannot have. The keys of asked are
// noun phrases, their values say whether the request asks for them. The error names the first one in alphabetical order.
func Refuse(extension string, asked map[string]bool) error {
	for _, what := range slices.Sorted(maps.Keys(asked)) {
		if asked[what] {
			return sandboxer.E(sandboxer.Unsupported, nil, "a sandbox of %s cannot have %s", extension, what).WithHint("leave that out, or use another profile")
		}
	}
	return nil
}

// Lifetime is the time that is left until the fuse, at least a millisecond, or longest if there is none.
func Lifetime(fuse time.Time, longest time.Duration) time.Duration {
	if fuse.IsZero() {
		return longest
	}
	return max(time.Until(fuse), time.Millisecond)
}

// Handle is the handle of an object; ok is false if the object is not a sandbox of this extension and owner.
func (s *Sandboxes) Handle(o Object, owner string) (h sandboxer.Handle, ok bool) {
	m, ok := hosts.ReadMark(prefix, o.Tags)
	return sandboxer.Handle{SandboxID: m.ID, Generation: m.Generation, Ref: o.Ref, Credential: o.account}, ok && m.Owner == owner && m.Extension == s.Env.Extension
}

// An attempt is the content of a note.
type attempt struct {
	At   time.Time `json:"at"`            // before the request, or when its answer was given up
	Ref  string    `json:"ref,omitempty"` // from the answer
	Fuse time.Time `json:"fuse,omitzero"` // if it was moved
}

func noteOf(h sandboxer.Handle) string { return h.SandboxID + ".g" + strconv.Itoa(h.Generation) }

// attempts returns the attempts to make h, by the names of their notes; generation 0 means all generations.
func (s *Sandboxes) attempts(ctx context.Context, h sandboxer.Handle) (map[string]attempt, error) {
	keys, found := []string{noteOf(h)}, map[string]attempt{}
	if h.Generation == 0 {
		var err error
		if keys, err = s.Env.Notes.List(ctx); err != nil {
			return nil, err
		}
	}
	for _, key := range keys {
		if id, _, _ := strings.Cut(key, "."); id != h.SandboxID {
			continue
		}
		n, err := s.Env.Notes.Get(ctx, key)
		if sandboxer.KindOf(err) == sandboxer.NotFound {
			continue
		}
		var a attempt
		if err == nil {
			_, err = strictjson.DecodeStored(n.Value, &a)
		}
		if err != nil {
			return nil, err
		}
		found[key] = a
	}
	return found, nil
}

func (s *Sandboxes) note(ctx context.Context, h sandboxer.Handle, a attempt) error {
	data, err := json.Marshal(a)
	if err != nil {
		return err
	}
	return s.Env.Notes.Put(ctx, noteOf(h), data)
}

// Fuse returns the fuse of o, one of this owner's, by our clock; zero if it is not known.
func (s *Sandboxes) Fuse(ctx context.Context, o Object) (time.Time, error) {
	is, _ := s.Handle(o, s.Env.Owner)
	attempts, err := s.attempts(ctx, is)
	if err != nil {
		return time.Time{}, err
	}
	if moved := attempts[noteOf(is)].Fuse; !moved.IsZero() {
		return moved, nil
	}
	fuse, _ := time.Parse(time.RFC3339Nano, o.Tags[tagFuse]) // zero if it cannot be read
	return fuse, nil
}

// KeepFuse notes that the fuse of o was moved, for a service whose tags cannot change.
func (s *Sandboxes) KeepFuse(ctx context.Context, o Object, fuse time.Time) error {
	is, _ := s.Handle(o, s.Env.Owner)
	attempts, err := s.attempts(ctx, is)
	if err != nil {
		return err
	}
	a := attempts[noteOf(is)]
	a.Ref, a.Fuse = o.Ref, fuse
	return s.note(ctx, is, a)
}

// makeTime bounds a create, including the search for its result after a lost answer.
const makeTime = time.Minute

// Make returns the sandbox of spec. It finds an existing one, or makes one by create, which gets its tags. Make is idempotent
// as Provision is. Kinds: those of create; Invalid for a tenant's key that the service refuses; Unavailable while the result of
// an earlier create is unknown.
func (s *Sandboxes) Make(ctx context.Context, spec sandboxer.Spec, create func(ctx context.Context, tags map[string]string) (Object, error)) (none sandboxer.Handle, err error) {
	if err := ctx.Err(); err != nil {
		return none, err
	}
	unlock, err := s.Env.Notes.Lock(ctx, spec.ID)
	if err != nil {
		return none, err
	}
	defer unlock()
	ctx = For(ctx, spec.Credential)
	h := sandboxer.Handle{SandboxID: spec.ID, Generation: spec.Generation, Credential: spec.Credential}
	o, err := s.Find(ctx, h)
	if sandboxer.KindOf(err) != sandboxer.NotFound {
		h.Ref = o.Ref
		return h, OfRequest(spec, err)
	}
	// The rest runs even if the caller leaves: a late effect must not follow the teardown that comes after an abandoned call.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), makeTime)
	defer cancel()
	a := attempt{At: time.Now()}
	if err := s.note(ctx, h, a); err != nil {
		return none, err
	}
	tags := hosts.Mark{Owner: spec.Owner, Extension: s.Env.Extension, ID: spec.ID, Generation: spec.Generation}.Labels(prefix)
	tags[tagFuse], tags[tagAttempt] = FuseTag(spec.Fuse)[tagFuse], strconv.FormatInt(a.At.UnixMilli(), 10)
	o, err = create(ctx, tags)
	switch {
	case sandboxer.IsUntouched(err):
		if forget := s.Env.Notes.Delete(ctx, noteOf(h)); forget != nil {
			return none, forget
		}
		return none, OfRequest(spec, err)
	case err != nil: // without an answer, the sandbox may exist all the same
		a.At = time.Now()
		if o, _ = s.Find(ctx, h); o.Ref == "" {
			_ = s.note(ctx, h, a) // if this fails, the note has the earlier time
			return none, err
		}
	}
	h.Ref, a.Ref = o.Ref, o.Ref
	if err := s.note(ctx, h, a); err != nil {
		return none, err
	}
	return h, nil
}

// OfRequest turns the error about an unusable key into one about the request, if the key is the tenant's: the service works.
// Make calls it; an adapter calls it for errors of its calls before Make.
func OfRequest(spec sandboxer.Spec, err error) error {
	if spec.Credential.Tenant == "" || !IsRefused(err) {
		return err
	}
	return sandboxer.Untouched(sandboxer.E(sandboxer.Invalid, err, "%s", sandboxer.Message(err)).WithHint("set another key: sandboxer secret set %s", spec.Credential.Name))
}

// objects returns the existing objects of h. Notes and the listing name candidates, and Get confirms each. If h has no key, the
// objects may be in any account. With an error there may be more than were found.
func (s *Sandboxes) objects(ctx context.Context, h sandboxer.Handle) (found []Object, err error) {
	attempts, err := s.attempts(ctx, h)
	if err != nil {
		return nil, err
	}
	accounts, err := s.Keys.Accounts(ctx, h.Credential)
	var refused error
	if h.Credential.Name == "" && h.Generation == 0 { // it is searched for
		accounts, err = s.Keys.accounts(ctx)
	} else if h.Credential.Name == "" {
		_, refused = s.Keys.Of(For(ctx, h.Credential))
	}
	if err != nil {
		return nil, err
	}
	for _, ref := range accounts {
		here, err := s.objectsIn(For(ctx, ref), h, attempts)
		if IsRefused(err) {
			refused, err = err, nil
		}
		if err != nil {
			return nil, err
		}
		found = append(found, here...)
	}
	if len(found) > 0 && h.Generation != 0 {
		refused = nil
	}
	for _, o := range found {
		is, _ := s.Handle(o, s.Env.Owner)
		delete(attempts, noteOf(is))
	}
	for _, a := range attempts {
		if wait := min(s.Settle-time.Since(a.At), s.Settle); a.Ref == "" && wait > 0 {
			e := sandboxer.E(sandboxer.Unavailable, nil, "an earlier create got no answer; the service may have made the sandbox without listing it yet").WithHint("try again in %s", s.Settle)
			e.RetryAfter = wait
			return nil, e
		}
	}
	return found, refused
}

// objectsIn is objects in the account of ctx only.
func (s *Sandboxes) objectsIn(ctx context.Context, h sandboxer.Handle, attempts map[string]attempt) (found []Object, err error) {
	refs := map[string]bool{h.Ref: true}
	for _, a := range attempts {
		refs[a.Ref] = true
	}
	for o, err := range s.List(ctx, hosts.Mark{Owner: s.Env.Owner, Extension: s.Env.Extension, ID: h.SandboxID, Generation: h.Generation}.Labels(prefix)) {
		if err != nil {
			return nil, err
		}
		refs[o.Ref] = true
	}
	delete(refs, "")
	for ref := range refs {
		o, err := s.Get(ctx, ref)
		is, ours := s.Handle(o, s.Env.Owner)
		switch {
		case sandboxer.KindOf(err) == sandboxer.NotFound:
		case err != nil:
			return nil, err
		case ours && is.SandboxID == h.SandboxID && (h.Generation == 0 || is.Generation == h.Generation):
			o.account = Account(ctx)
			found = append(found, o)
		}
	}
	return found, nil
}

// Find returns the sandbox of h, the newest one if h has no generation. Kinds: NotFound; Unavailable, also while the result of
// a create is unknown.
func (s *Sandboxes) Find(ctx context.Context, h sandboxer.Handle) (newest Object, err error) {
	var found []Object
	if h.Ref != "" && h.Generation != 0 { // the handle names it, so no search is needed
		o, err := s.Get(For(ctx, h.Credential), h.Ref)
		o.account = h.Credential
		if err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			return newest, err
		}
		if is, ours := s.Handle(o, s.Env.Owner); ours && is.SandboxID == h.SandboxID && is.Generation == h.Generation {
			found = append(found, o)
		}
	} else if found, err = s.objects(ctx, h); err != nil && len(found) == 0 {
		return newest, err
	}
	last := 0
	for _, o := range found {
		if is, _ := s.Handle(o, s.Env.Owner); is.Generation > last || is.Generation == last && o.Ref < newest.Ref {
			newest, last = o, is.Generation
		}
	}
	if newest.Ref == "" {
		return newest, sandboxer.E(sandboxer.NotFound, nil, "the service has no sandbox %s", h.SandboxID)
	}
	return newest, nil
}

// Ref returns the service's name for the sandbox of h. If h has the name, the sandbox need not exist any more.
func (s *Sandboxes) Ref(ctx context.Context, h sandboxer.Handle) (string, error) {
	if h.Ref != "" {
		return h.Ref, nil
	}
	o, err := s.Find(ctx, h)
	return o.Ref, err
}

// On returns the ctx for calls with the key of the sandbox of h, and h completed with the service's name. If h has the name,
// the sandbox need not exist any more.
func (s *Sandboxes) On(ctx context.Context, h sandboxer.Handle) (context.Context, sandboxer.Handle, error) {
	if h.Ref == "" || h.Generation == 0 {
		o, err := s.Find(ctx, h)
		if err != nil {
			return ctx, h, err
		}
		h, _ = s.Handle(o, s.Env.Owner)
	}
	return For(ctx, h.Credential), h, nil
}

// Teardown implements sandboxer.Extension.
func (s *Sandboxes) Teardown(ctx context.Context, h sandboxer.Handle) (report sandboxer.CleanupReport, err error) {
	if err := ctx.Err(); err != nil {
		return report, err
	}
	unlock, err := s.Env.Notes.Lock(ctx, h.SandboxID) // a create under way ends first
	if err != nil {
		return report, err
	}
	defer unlock()
	found, err := s.objects(ctx, h)
	if err != nil && len(found) == 0 {
		return report, err
	}
	for _, o := range found {
		if err := s.Delete(For(ctx, o.account), o.Ref); err != nil && sandboxer.KindOf(err) != sandboxer.NotFound {
			return report, err
		}
		report.Removed = append(report.Removed, "sandbox "+o.Ref+" of "+s.Env.Extension)
	}
	if err != nil { // another account cannot be asked
		return report, err
	}
	return report, s.forget(ctx, h)
}

// forget removes the notes of h.
func (s *Sandboxes) forget(ctx context.Context, h sandboxer.Handle) error {
	attempts, err := s.attempts(ctx, h)
	for key := range attempts {
		err = cmp.Or(err, s.Env.Notes.Delete(ctx, key))
	}
	return err
}

// Forget implements sandboxer.Forgetter, for a sandbox whose key was revoked or removed.
func (s *Sandboxes) Forget(ctx context.Context, h sandboxer.Handle) ([]string, error) {
	unlock, err := s.Env.Notes.Lock(ctx, h.SandboxID)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if _, err := s.objects(ctx, h); !IsRefused(err) {
		return nil, sandboxer.E(sandboxer.Unsupported, err, "the key still works, so %s can remove the sandbox", s.Env.Extension).
			WithHint("destroy it; a failed removal is tried again")
	}
	if err := s.forget(ctx, h); err != nil {
		return nil, err
	}
	what, whose := "a sandbox", "of the key in the file of "+s.Env.Extension
	if h.Ref != "" {
		what += " " + h.Ref
	}
	if h.Credential.Name != "" {
		whose = "of the " + h.Credential.String()
	}
	return []string{what + " at the service, in the account " + whose}, nil
}

// Credential implements sandboxer.Credentialed.
func (s *Sandboxes) Credential() sandboxer.Credential { return s.Keys.credential() }

// IsAlive implements sandboxer.Prober.
func (s *Sandboxes) IsAlive(ctx context.Context, h sandboxer.Handle) (sandboxer.Liveness, error) {
	switch o, err := s.Find(ctx, h); sandboxer.KindOf(err) {
	case "":
		if o.Down {
			return sandboxer.Unresponsive, nil
		}
		return sandboxer.Alive, nil
	case sandboxer.NotFound:
		return sandboxer.Gone, nil
	default:
		return sandboxer.Unknown, err
	}
}

// Discover implements sandboxer.Discoverer.
func (s *Sandboxes) Discover(ctx context.Context, id string) (sandboxer.Found, error) {
	o, err := s.Find(ctx, sandboxer.Handle{SandboxID: id})
	if IsRefused(err) { // the key is refused, so nothing can be done with a sandbox there
		err = sandboxer.E(sandboxer.NotFound, err, "no account that answers has a sandbox %s", id)
	}
	if err != nil {
		return sandboxer.Found{}, err
	}
	h, _ := s.Handle(o, s.Env.Owner)
	fuse, err := s.Fuse(ctx, o)
	return sandboxer.Found{Handle: h, Fuse: fuse}, err
}

// ListRunning implements sandboxer.Lister.
func (s *Sandboxes) ListRunning(ctx context.Context, owner string) iter.Seq2[sandboxer.Handle, error] {
	return func(yield func(sandboxer.Handle, error) bool) {
		seen := map[[2]string]bool{} // two versions of a secret may be keys to one account
		all := Everywhere(ctx, s.Keys, func(ctx context.Context) iter.Seq2[Object, error] {
			return func(yield func(Object, error) bool) {
				for o, err := range s.List(ctx, hosts.Mark{Owner: owner, Extension: s.Env.Extension}.Labels(prefix)) {
					o.account = Account(ctx)
					if !yield(o, err) {
						return
					}
				}
			}
		})
		for o, err := range all {
			h, ok := s.Handle(o, owner)
			key := [2]string{o.Ref, noteOf(h)}
			if err == nil && (!ok || seen[key]) {
				continue
			}
			seen[key] = true
			if !yield(h, err) {
				return
			}
		}
	}
}

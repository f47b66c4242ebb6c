package provisioner

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

// createBody is the body of a create. Unknown names are from later contracts, and ignored.
type createBody struct {
	SandboxID    *string     `json:"sandbox_id"`
	ThreadID     *string     `json:"thread_id"`
	UserID       *string     `json:"user_id"`
	Contract     *int        `json:"required_mount_contract_version"`
	LegacySkills bool        `json:"include_legacy_skills"`
	LarkRuntime  bool        `json:"provision_lark_cli_runtime"`
	LarkBroker   bool        `json:"provision_lark_cli_broker"`
	Mounts       []mountBody `json:"extra_mounts"`
}

type mountBody struct {
	HostPath      string `json:"host_path"`
	ContainerPath string `json:"container_path"`
	ReadOnly      bool   `json:"read_only"`
}

// order is a create that was checked as far as possible without looking at anything.
type order struct {
	id, user string
	thread   string // the sandbox's own ID where none is given
	threaded bool   // one is given
	legacy   bool
	lark     bool // the Lark CLI is asked for
	mounts   []mountBody
}

// fault is the error for an invalid request, in the form of the provisioner's own server.
type fault struct {
	Type  string `json:"type"`
	Loc   []any  `json:"loc"`
	Msg   string `json:"msg"`
	Input any    `json:"input"`
}

// wrongType says where in the body a value has the wrong type.
func wrongType(body any, te *json.UnmarshalTypeError) *fault {
	f := &fault{Loc: []any{"body"}, Input: body}
	switch te.Type.Kind() {
	case reflect.String:
		f.Type, f.Msg = "string_type", "Input should be a valid string"
	case reflect.Bool:
		f.Type, f.Msg = "bool_type", "Input should be a valid boolean"
	case reflect.Int:
		f.Type, f.Msg = "int_type", "Input should be a valid integer"
	case reflect.Slice:
		f.Type, f.Msg = "list_type", "Input should be a valid list"
	default:
		f.Type, f.Msg = "model_attributes_type", "Input should be a valid dictionary or object to extract fields from"
	}
	if te.Field == "" {
		return f
	}
	for i, name := range strings.Split(te.Field, ".") {
		fields, _ := f.Input.(map[string]any)
		f.Loc, f.Input = append(f.Loc, name), fields[name]
		items, ok := f.Input.([]any)
		if i > 0 || name != "extra_mounts" || !ok {
			continue
		}
		n := slices.IndexFunc(items, func(item any) bool {
			b, err := json.Marshal(item)
			if err == nil {
				_, err = strictjson.DecodeStored(b, &mountBody{})
			}
			return err != nil
		})
		if n >= 0 {
			f.Loc, f.Input = append(f.Loc, n), items[n]
		}
	}
	return f
}

// decodeCreate reads the body of a create: an order, or what is wrong with it.
func decodeCreate(data []byte) (o order, contract *int, _ *fault) {
	var b createBody
	var sent any
	_, _ = strictjson.DecodeStored(data, &sent) // the next call reports an invalid one
	if _, err := strictjson.DecodeStored(data, &b); err != nil {
		var te *json.UnmarshalTypeError
		if errors.As(err, &te) {
			return o, nil, wrongType(sent, te)
		}
		return o, nil, &fault{"json_invalid", []any{"body"}, "JSON decode error: " + err.Error(), struct{}{}}
	}
	bad := func(kind, field string, input any, format string, args ...any) *fault {
		return &fault{kind, []any{"body", field}, fmt.Sprintf(format, args...), input}
	}
	mismatch := func(field, input, pattern string) *fault {
		return bad("string_pattern_mismatch", field, input, "String should match pattern '%s'", pattern)
	}
	if b.SandboxID == nil {
		return o, nil, bad("missing", "sandbox_id", sent, "Field required")
	}
	o = order{id: *b.SandboxID, user: sandboxer.DefaultUser, thread: *b.SandboxID, legacy: b.LegacySkills, lark: b.LarkRuntime || b.LarkBroker, mounts: b.Mounts}
	if sandboxer.CheckID(o.id) != nil {
		return o, nil, mismatch("sandbox_id", o.id, "^[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?$")
	}
	if b.UserID != nil {
		if o.user = *b.UserID; !userName.MatchString(o.user) {
			return o, nil, mismatch("user_id", o.user, userName.String())
		}
		if len(o.user) > maxUser {
			return o, nil, bad("string_too_long", "user_id", o.user, "String should have at most %d characters", maxUser)
		}
	}
	if b.ThreadID != nil {
		if o.thread, o.threaded = *b.ThreadID, true; !threadName.MatchString(o.thread) {
			return o, nil, mismatch("thread_id", o.thread, threadName.String())
		}
	}
	fields, _ := sent.(map[string]any)
	items, _ := fields["extra_mounts"].([]any)
	for i, item := range items {
		mount, _ := item.(map[string]any)
		for _, name := range []string{"host_path", "container_path"} {
			if mount[name] == nil {
				return o, nil, &fault{"missing", []any{"body", "extra_mounts", i, name}, "Field required", item}
			}
		}
	}
	return o, b.Contract, nil
}

// labels identify the user and the thread of an order's sandbox.
func (o order) labels() map[string]string {
	return map[string]string{labelContract: fmt.Sprint(mountContract), labelUser: o.user, labelThread: o.thread}
}

// has reports whether sb was made for the user and the thread of the order.
func (o order) has(sb *sandboxer.Sandbox) bool {
	return sb.Spec.Labels[labelUser] == o.user && sb.Spec.Labels[labelThread] == o.thread && sb.Spec.Labels[labelContract] != ""
}

// asked is the thread for the manager, which is none if the ID is not the thread's:
// earlier versions of deer-flow, and its sandboxes without a thread, have other IDs.
func (o order) asked() sandboxer.Thread {
	t := sandboxer.Thread{User: o.user, ID: o.thread}
	if id, err := t.SandboxID(); !o.threaded || err != nil || id != o.id {
		return sandboxer.Thread{}
	}
	return t
}

// create makes a sandbox, or finds the existing one, and answers when it runs, or after some 25 s with its
// state then.
func (p *Provisioner) create(w http.ResponseWriter, r *http.Request) error {
	body, err := edge.ReadAll(r, maxBody, bodyTime)
	if err != nil {
		return err
	}
	o, contract, bad := decodeCreate(body)
	if bad != nil {
		edge.LogError(r.Context(), sandboxer.E(sandboxer.Invalid, nil, "%v: %s", bad.Loc, bad.Msg))
		writeJSON(w, http.StatusUnprocessableEntity, map[string]any{"detail": []*fault{bad}})
		return nil
	}
	if contract != nil && *contract != mountContract {
		writeJSON(w, http.StatusConflict, map[string]any{"detail": map[string]any{"code": "mount_contract_changed", "actual": mountContract}})
		return nil
	}
	if o.lark { // deer-flow asks for it whatever the capabilities say, and its own server ignores that, too
		p.larkTold.Do(func() {
			p.opts.Log.Warn("deer-flow asks for the Lark CLI in its sandboxes, but this server has no image with it: they are made without it")
		})
	}
	ctx, cancel := context.WithTimeout(r.Context(), p.patience)
	defer cancel()
	sb, err := p.ensure(ctx, o)
	if err != nil && ctx.Err() != nil && r.Context().Err() == nil { // the work goes on
		var ferr error
		if sb, ferr = p.find(r.Context(), o.id); ferr == nil && o.has(sb) {
			err = nil
		} else {
			e := sandboxer.E(sandboxer.Unavailable, err, "the creation of sandbox %s could not start within %s", o.id, sandboxer.FormatDuration(p.patience))
			err = e.WithHint("try again: the previous one is still being removed, or there is no room")
		}
	}
	if err != nil {
		return err
	}
	a, err := p.answer(r.Context(), sb)
	if err == nil {
		writeJSON(w, http.StatusOK, a)
	}
	return err
}

// ensure returns the sandbox of the order, running.
func (p *Provisioner) ensure(ctx context.Context, o order) (*sandboxer.Sandbox, error) {
	who := sandboxer.PrincipalFrom(ctx)
	for tries := 0; ; tries++ {
		sb, err := p.sandboxes.GetChosen(ctx, o.id)
		was := sb
		switch {
		case err != nil && sandboxer.KindOf(err) != sandboxer.NotFound:
			return nil, err
		case err == nil && isThere(sb) && !o.has(sb):
			return nil, sandboxer.E(sandboxer.Conflict, nil, "sandbox %s belongs to another user or thread", o.id)
		case err == nil && isThere(sb):
			sb, err = p.wake(ctx, sb)
		default:
			sb, err = p.make(ctx, who, o)
		}
		if err == nil {
			if err = p.prepare(ctx, sb); err == nil {
				return sb, nil
			}
			if p.isPrepared(objectOf(sb)) && tries <= 3 {
				continue // another create of the ID has answered with it
			}
			if (was == nil || !isThere(was)) && !sb.Found && ctx.Err() == nil && p.unheard(ctx, o, sb) {
				if _, derr := p.sandboxes.Destroy(ctx, sb.Ref()); derr != nil {
					p.opts.Log.WarnContext(ctx, "a sandbox that cannot be used is removed later", "sandbox", sb.ID, "err", derr)
				}
				return nil, err
			}
		}
		// It may have ended, or another request may have made it, since the last look.
		if k := sandboxer.KindOf(err); k != sandboxer.Conflict && k != sandboxer.NotFound || tries > 3 || ctx.Err() != nil {
			return nil, err
		}
	}
}

// unheard reports whether no answer has named sb, which a create has just made, and the order's ID is still its.
func (p *Provisioner) unheard(ctx context.Context, o order, sb *sandboxer.Sandbox) bool {
	now, err := p.sandboxes.GetChosen(ctx, o.id)
	return err == nil && now.ID == sb.ID && now.Generation == sb.Generation && !p.isPrepared(objectOf(sb))
}

// wake returns sb when it runs.
func (p *Provisioner) wake(ctx context.Context, sb *sandboxer.Sandbox) (*sandboxer.Sandbox, error) {
	b, _, err := p.bearer(ctx, sb.ID, p.sandboxes.BearerToken(sb))
	if err != nil {
		return nil, err
	}
	return b.Awake(ctx)
}

// make creates the sandbox of the order.
func (p *Provisioner) make(ctx context.Context, who sandboxer.Principal, o order) (*sandboxer.Sandbox, error) {
	mounts, err := p.mounts(who.Tenant, o)
	if err != nil {
		return nil, err
	}
	if len(mounts) > 0 {
		who.Vouches = []string{sandboxer.RestrictedMounts} // they are what the operator has said
	}
	sb, err := p.sandboxes.Create(sandboxer.WithPrincipal(ctx, who), sandboxer.CreateRequest{
		Profile: p.opts.Profile, Inputs: map[string]string{"sandbox_id": o.id}, Thread: o.asked(), Labels: o.labels(), Mounts: mounts,
		Consumer: sandboxer.Consumer{ID: o.user, Kind: "deer-flow"},
	})
	switch k := sandboxer.KindOf(err); {
	case err != nil && len(mounts) > 0 && (k == sandboxer.Denied || k == sandboxer.NotFound || k == sandboxer.Unsupported):
		return nil, edge.WithStatus(http.StatusBadRequest, err)
	}
	return sb, err
}

// targets are where requests may mount something, and whether the mount may be writable.
var targets = map[string]bool{
	"/mnt/acp-workspace":                      true,
	"/mnt/skills/custom":                      true,
	"/mnt/skills/integrations":                true,
	"/mnt/integrations/lark-cli/config":       true,
	"/mnt/integrations/lark-cli/config/locks": true,
	"/mnt/integrations/lark-cli/data":         true,
	"/mnt/integrations/lark-cli/runtime":      true,
	"/mnt/user-data/.upload-conversions":      false,
}

const maxMounts = 10

// mounts returns the mounts of an order's sandbox: its user's directories, skills, and
// those that the request names. Kind: Invalid.
func (p *Provisioner) mounts(tenant string, o order) ([]sandboxer.Mount, error) {
	refuse := func(format string, args ...any) *sandboxer.Error {
		return sandboxer.E(sandboxer.Invalid, nil, "extra_mounts: "+format, args...)
	}
	if len(o.mounts) > maxMounts {
		return nil, refuse("%d mounts are too many: want at most %d", len(o.mounts), maxMounts)
	}
	var extra []sandboxer.Mount
	for _, m := range o.mounts {
		at := path.Clean(m.ContainerPath)
		writable, known := targets[at]
		one := sandboxer.Mount{Source: filepath.Clean(m.HostPath), Target: at, ReadOnly: m.ReadOnly}
		switch {
		case !path.IsAbs(m.ContainerPath):
			return nil, refuse("the container path %q is not absolute", m.ContainerPath)
		case !known:
			return nil, refuse("mounts at %s are not allowed", at)
		case !writable && !m.ReadOnly:
			return nil, refuse("the mount at %s must be read-only", at)
		case slices.ContainsFunc(extra, func(e sandboxer.Mount) bool { return e.Target == at }):
			return nil, refuse("%s is given twice", at)
		case !filepath.IsAbs(m.HostPath) || strings.ContainsRune(m.HostPath, 0):
			return nil, refuse("the host path %q of %s is not an absolute path of this machine", m.HostPath, at)
		case !slices.ContainsFunc(p.opts.MountRoots, func(r MountRoot) bool { return one.Within(r.Path, r.ReadOnly) }):
			if p.opts.IgnoreMounts {
				continue
			}
			return nil, refuse("the host path %s is in no directory that may be mounted%s", one.Source, map[bool]string{false: " for writing"}[m.ReadOnly]).
				WithHint("the server's operator lists those directories in the setting deerflow_mount_roots")
		}
		extra = append(extra, one)
	}
	data, err := p.userData(tenant, o)
	if err != nil {
		return nil, err
	}
	skills, err := p.skills(tenant, o)
	if err != nil {
		return nil, err
	}
	skills = slices.DeleteFunc(skills, func(m sandboxer.Mount) bool {
		return slices.ContainsFunc(extra, func(e sandboxer.Mount) bool { return e.Target == m.Target })
	})
	for _, m := range extra {
		if err := p.makeSource(m); err != nil {
			return nil, refuse("the directory %s cannot be made: %v", m.Source, err)
		}
	}
	return slices.Concat(data, skills, extra), nil
}

// makeSource makes the directory of a writable mount, if it does not exist, as deer-flow's own server does.
func (p *Provisioner) makeSource(m sandboxer.Mount) error {
	i := slices.IndexFunc(p.opts.MountRoots, func(r MountRoot) bool { return !m.ReadOnly && m.Within(r.Path, r.ReadOnly) })
	if i < 0 {
		return nil
	}
	base := p.opts.MountRoots[i].Path
	root, err := os.OpenRoot(base)
	if err != nil {
		return err
	}
	defer root.Close()
	dir, err := filepath.Rel(base, m.Source)
	if err != nil {
		return err
	}
	if _, err := root.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		return nil // whether it can be mounted, the extension says
	}
	st, err := root.Stat(".")
	if err != nil {
		return err
	}
	owner, _ := st.Sys().(*syscall.Stat_t)
	return makeDirs(root, dir, owner)
}

// skills are the existing directories of skills. Those of deer-flow's own state, which has them for each user, come before
// those that all users share.
func (p *Provisioner) skills(tenant string, o order) (mounts []sandboxer.Mount, err error) {
	var dirs []string
	if p.opts.UserData != "" {
		home := filepath.Join(p.opts.UserData, dirName(tenant))
		own := filepath.Join(home, "users", o.user, "skills_view")
		dirs = append(dirs, filepath.Join(home, "skills_view", "public"), filepath.Join(own, "custom"), filepath.Join(own, "legacy"))
	}
	if p.opts.Skills != "" {
		dirs = append(dirs, filepath.Join(p.opts.Skills, "public"))
		if o.legacy {
			dirs = append(dirs, filepath.Join(p.opts.Skills, "legacy"))
		}
	}
	for _, dir := range dirs {
		one := sandboxer.Mount{Source: dir, Target: "/mnt/skills/" + filepath.Base(dir), ReadOnly: true}
		if slices.ContainsFunc(mounts, func(m sandboxer.Mount) bool { return m.Target == one.Target }) {
			continue
		}
		switch st, err := os.Lstat(dir); {
		case errors.Is(err, fs.ErrNotExist):
			continue // there are none
		case err != nil || !st.IsDir():
			return nil, sandboxer.E(sandboxer.Unavailable, err, "the skills in %s cannot be mounted: it is no directory that can be read", dir)
		}
		mounts = append(mounts, one)
	}
	return mounts, nil
}

// userDirs are the directories of a thread that deer-flow and its sandbox share.
var userDirs = []string{"workspace", "uploads", "outputs"}

const userDataPath = "/mnt/user-data"

// userData makes the directories for a tenant's, user's and thread's files, as deer-flow lays them out,
// and returns their mounts. The owner of their common parent owns them.
func (p *Provisioner) userData(tenant string, o order) (mounts []sandboxer.Mount, err error) {
	if p.opts.UserData == "" {
		return nil, nil
	}
	unusable := func(err error) error {
		return sandboxer.E(sandboxer.Unavailable, err, "the directories for the files of users cannot be made below %s (deerflow_user_data)", p.opts.UserData)
	}
	root, err := os.OpenRoot(p.opts.UserData)
	if err != nil {
		return nil, unusable(err)
	}
	defer root.Close()
	st, err := root.Stat(".")
	if err != nil {
		return nil, unusable(err)
	}
	owner, _ := st.Sys().(*syscall.Stat_t)
	base := filepath.Join(dirName(tenant), "users", o.user, "threads", o.thread, "user-data")
	for _, name := range userDirs {
		dir := filepath.Join(base, name)
		if err := makeDirs(root, dir, owner); err != nil {
			return nil, unusable(err)
		}
		mounts = append(mounts, sandboxer.Mount{Source: filepath.Join(p.opts.UserData, dir), Target: p.data + "/" + name})
	}
	return mounts, nil
}

// makeDirs makes a directory below root with its parents. New ones belong to owner.
func makeDirs(root *os.Root, dir string, owner *syscall.Stat_t) error {
	at := ""
	for part := range strings.SplitSeq(filepath.ToSlash(dir), "/") {
		at = filepath.Join(at, part)
		err := root.Mkdir(at, 0o750)
		if errors.Is(err, fs.ErrExist) {
			st, err := root.Lstat(at)
			if err == nil && !st.IsDir() {
				err = fmt.Errorf("%s is not a directory", at)
			}
			if err != nil {
				return err
			}
			continue
		}
		if err == nil && owner != nil && int(owner.Uid) != os.Geteuid() {
			err = root.Lchown(at, int(owner.Uid), int(owner.Gid))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}$`)

// dirName is a name of a directory for a tenant, whose own may be any text: no two tenants share one.
func dirName(tenant string) string {
	if plainName.MatchString(tenant) && !digested.MatchString(tenant) {
		return tenant
	}
	sum := sha256.Sum256([]byte(tenant))
	return "t-" + hex.EncodeToString(sum[:])[:32]
}

var digested = regexp.MustCompile(`^t-[0-9a-f]{32}$`)

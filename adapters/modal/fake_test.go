//go:build linux

package modal

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	pb "github.com/modal-labs/modal-client/go/proto/modal_proto"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

const (
	tokenID, tokenSecret = "ak-fake", "as-fake"
	fakeKey              = tokenID + ":" + tokenSecret
)

// A fake is Modal, as far as the adapter uses it: over gRPC, with the vendor's own messages. The control plane and the workers are
// one server.
type fake struct {
	pb.UnimplementedModalClientServer
	t   testing.TB
	dir string
	url string

	mu      sync.Mutex
	n       int
	keys    map[string]string // accounts: secrets by ID of the token
	apps    map[[2]string]string
	images  map[string]image
	boxes   map[string]*sandbox
	execs   map[string]*running
	auth    map[string]login // by token
	answers map[string]any   // of creates, by idempotency key
	tries   map[string]int   // attempts, by idempotency key
	calls   map[string]int   // by method
	faults
}

// faults are what the fake does wrong on purpose.
type faults struct {
	refuse  map[string]error // by method, "" for every method: before anything is done
	times   int              // how often; negative is for ever
	lose    map[string]bool  // by method: it is done, and the answer is lost
	lag     time.Duration    // of the listing behind creates and ends
	skew    time.Duration    // of the clock
	revoked bool             // every key
	silent  chan struct{}    // no answer until it is closed
	drop    int              // a stream breaks after so many bytes
	life    time.Duration    // of tokens
}

// A login is what a token of the fake is for, and until when.
type login struct {
	end     time.Time
	account string
}

type image struct{ dir, account string }

type sandbox struct {
	*box
	account             string
	id, task, app, name string
	tags                map[string]string
	made, ended         time.Time
	code                int32
	timer               *time.Timer
	req                 *pb.Sandbox
}

type running struct {
	in       io.WriteCloser
	written  uint64
	out, err *output
	done     chan struct{}
	code     int32
}

func newFake(t testing.TB) *fake {
	t.Helper()
	f := &fake{t: t, dir: t.TempDir(), keys: map[string]string{tokenID: tokenSecret}, apps: map[[2]string]string{}, images: map[string]image{},
		boxes: map[string]*sandbox{}, execs: map[string]*running{}, auth: map[string]login{}, answers: map[string]any{}, tries: map[string]int{}, calls: map[string]int{}, faults: faults{life: time.Hour}}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnaryInterceptor(f.unary), grpc.StreamInterceptor(f.stream), grpc.MaxRecvMsgSize(100<<20))
	pb.RegisterModalClientServer(s, f)
	pb.RegisterTaskCommandRouterServer(s, &router{f: f})
	go func() { _ = s.Serve(l) }()
	f.url = "http://" + l.Addr().String()
	t.Cleanup(func() {
		s.Stop()
		f.mu.Lock()
		boxes := slices.Collect(maps.Values(f.boxes))
		f.mu.Unlock()
		for _, b := range boxes {
			b.timer.Stop()
			b.clean(t)
		}
	})
	return f
}

func (f *fake) set(change func(*faults)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(&f.faults)
}

func (f *fake) now() time.Time { return time.Now().Add(f.skew) }

func (f *fake) next(prefix string) string {
	f.n++
	return prefix + "-fake" + strconv.Itoa(f.n)
}

func jwt(exp time.Time, n int) string {
	part := base64.RawURLEncoding.EncodeToString
	return part([]byte(`{"alg":"none"}`)) + "." + part(fmt.Appendf(nil, `{"exp":%d,"n":%d}`, exp.Unix(), n)) + ".x"
}

func value(ctx context.Context, name string) string {
	md, _ := metadata.FromIncomingContext(ctx)
	all := md.Get(name) // the client adds some twice: for a token that a request needs, to what the request carries
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1]
}

// admit checks what every request has to carry, and makes the faults that come before anything is done.
func (f *fake) admit(ctx context.Context, full string, unary bool) error {
	method := full[strings.LastIndexByte(full, '/')+1:]
	f.mu.Lock()
	f.calls[method]++
	silent := f.silent
	f.mu.Unlock()
	if silent != nil {
		select {
		case <-silent:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	denied := status.Error(codes.Unauthenticated, "the token is not valid")
	if strings.Contains(full, "TaskCommandRouter") {
		token, _ := strings.CutPrefix(value(ctx, "authorization"), "Bearer ")
		if l, ok := f.auth[token]; !ok || f.now().After(l.end) || f.revoked || f.keys[l.account] == "" {
			return denied
		}
	} else {
		id, secret := value(ctx, "x-modal-token-id"), value(ctx, "x-modal-token-secret")
		if secret == "" || f.keys[id] != secret || f.revoked {
			return denied
		}
		if l, ok := f.auth[value(ctx, "x-modal-auth-token")]; method != "AuthTokenGet" && unary && (!ok || f.now().After(l.end) || l.account != id) {
			return denied
		}
		if key := value(ctx, "x-idempotency-key"); unary {
			throttled, err := strconv.Atoi(value(ctx, "x-throttle-retry-attempt"))
			attempt, err2 := strconv.Atoi(value(ctx, "x-retry-attempt"))
			if key == "" || errors.Join(err, err2) != nil || attempt+throttled != f.tries[key] {
				f.t.Errorf("%s: idempotency key %q, attempts %d and %d after %d (%v, %v)", method, key, attempt, throttled, f.tries[key], err, err2)
			}
			f.tries[key]++
		}
	}
	for _, m := range []string{method, ""} {
		if err := f.refuse[m]; err != nil && f.times != 0 && (m != "" || method != "AuthTokenGet") {
			f.times--
			return err
		}
	}
	return nil
}

func (f *fake) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, do grpc.UnaryHandler) (any, error) {
	if err := f.admit(ctx, info.FullMethod, true); err != nil {
		return nil, err
	}
	method, key := info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:], value(ctx, "x-idempotency-key")
	f.mu.Lock()
	answer, lost := f.answers[key], f.lose[method]
	f.mu.Unlock()
	var err error
	if answer == nil {
		answer, err = do(ctx, req)
		if err == nil && method == "SandboxCreateV2" {
			f.mu.Lock()
			f.answers[key] = answer
			f.mu.Unlock()
		}
	}
	if lost && err == nil {
		return nil, status.Error(codes.Unavailable, "the connection broke")
	}
	return answer, err
}

func (f *fake) stream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, do grpc.StreamHandler) error {
	if err := f.admit(s.Context(), info.FullMethod, false); err != nil {
		return err
	}
	return do(srv, s)
}

// account is whose request it is. f.mu is held.
func (f *fake) account(ctx context.Context) string {
	if token, router := strings.CutPrefix(value(ctx, "authorization"), "Bearer "); router {
		return f.auth[token].account
	}
	return value(ctx, "x-modal-token-id")
}

func (f *fake) token(ctx context.Context) string {
	f.n++
	end := f.now().Add(f.life)
	t := jwt(end, f.n)
	f.auth[t] = login{end, f.account(ctx)}
	return t
}

// AuthTokenGet and the methods below are the RPCs of the control plane.
func (f *fake) AuthTokenGet(ctx context.Context, _ *pb.AuthTokenGetRequest) (*pb.AuthTokenGetResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return pb.AuthTokenGetResponse_builder{Token: f.token(ctx)}.Build(), nil
}

func (f *fake) AppGetOrCreate(ctx context.Context, r *pb.AppGetOrCreateRequest) (*pb.AppGetOrCreateResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := [2]string{f.account(ctx), r.GetAppName()}
	if f.apps[name] == "" {
		if r.GetObjectCreationType() != pb.ObjectCreationType_OBJECT_CREATION_TYPE_CREATE_IF_MISSING {
			return nil, status.Error(codes.NotFound, "no such app")
		}
		f.apps[name] = f.next("ap")
	}
	return pb.AppGetOrCreateResponse_builder{AppId: f.apps[name]}.Build(), nil
}

func (f *fake) EnvironmentGetOrCreate(context.Context, *pb.EnvironmentGetOrCreateRequest) (*pb.EnvironmentGetOrCreateResponse, error) {
	return pb.EnvironmentGetOrCreateResponse_builder{EnvironmentId: "en-1", Metadata: pb.EnvironmentMetadata_builder{Name: "main",
		Settings: pb.EnvironmentSettings_builder{ImageBuilderVersion: "2026.01"}.Build()}.Build()}.Build(), nil
}

func (f *fake) ImageGetOrCreate(_ context.Context, r *pb.ImageGetOrCreateRequest) (*pb.ImageGetOrCreateResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	what := strings.Join(r.GetImage().GetDockerfileCommands(), "\n")
	if strings.Contains(what, "sandboxer.invalid") {
		return pb.ImageGetOrCreateResponse_builder{ImageId: f.next("im"), Result: pb.GenericResult_builder{Status: pb.GenericResult_GENERIC_STATUS_FAILURE, Exception: "the image cannot be pulled"}.Build()}.Build(), nil
	}
	if f.images["im-base"].dir == "" {
		dir := filepath.Join(f.dir, "im-base")
		if err := skeleton(dir); err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		f.images["im-base"] = image{dir: dir}
	}
	return pb.ImageGetOrCreateResponse_builder{ImageId: "im-base", Result: pb.GenericResult_builder{Status: pb.GenericResult_GENERIC_STATUS_SUCCESS}.Build()}.Build(), nil
}

// image is the directory of an image that ctx's account may use: the base is everybody's.
func (f *fake) image(ctx context.Context, id string) string {
	if i := f.images[id]; i.account == "" || i.account == f.account(ctx) {
		return i.dir
	}
	return ""
}

func (f *fake) ImageFromId(ctx context.Context, r *pb.ImageFromIdRequest) (*pb.ImageFromIdResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.image(ctx, r.GetImageId()) == "" {
		return nil, status.Error(codes.NotFound, "no such image")
	}
	return pb.ImageFromIdResponse_builder{ImageId: r.GetImageId()}.Build(), nil
}

func (f *fake) ImageDelete(ctx context.Context, r *pb.ImageDeleteRequest) (*emptypb.Empty, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.image(ctx, r.GetImageId()) == "" {
		return nil, status.Error(codes.NotFound, "no such image")
	}
	delete(f.images, r.GetImageId())
	return &emptypb.Empty{}, nil
}

func (f *fake) SandboxCreateV2(ctx context.Context, r *pb.SandboxCreateV2Request) (*pb.SandboxCreateV2Response, error) {
	d := r.GetDefinition()
	if d.GetTimeoutSecs() == 0 || d.GetTimeoutSecs() > 24*3600 || d.GetRuntime() != "gvisor" || d.GetResources().GetMilliCpuMax() == 0 || d.GetResources().GetMemoryMbMax() == 0 {
		f.t.Errorf("a create without a lifetime, a runtime or limits: %v", d)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	image, account := f.image(ctx, d.GetImageId()), f.account(ctx)
	known := false
	for name, id := range f.apps {
		known = known || id == r.GetAppId() && name[0] == account
	}
	if image == "" || !known {
		return nil, status.Error(codes.NotFound, "no such app or image")
	}
	for _, b := range f.boxes {
		if b.account == account && b.name == d.GetName() && b.name != "" && b.ended.IsZero() {
			return nil, status.Error(codes.AlreadyExists, "the name is taken")
		}
	}
	env := map[string]string{}
	for _, s := range r.GetSecretSources() {
		maps.Copy(env, s.GetEnv().GetContents())
	}
	sb := &sandbox{account: account, id: f.next("sb"), task: f.next("ta"), app: r.GetAppId(), name: d.GetName(), tags: map[string]string{}, made: time.Now(), req: d}
	for _, tag := range r.GetTags() {
		sb.tags[tag.GetTagName()] = tag.GetTagValue()
	}
	var err error
	if sb.box, err = newBox(f.dir, sb.id, image, d.GetResources().GetMilliCpuMax(), d.GetResources().GetMemoryMbMax(), env); err != nil {
		f.t.Error(err)
		return nil, status.Error(codes.Internal, err.Error())
	}
	sb.timer = time.AfterFunc(time.Duration(d.GetTimeoutSecs())*time.Second, func() { f.kill(sb.id, 124) })
	f.boxes[sb.id] = sb
	return pb.SandboxCreateV2Response_builder{SandboxId: sb.id, TaskId: sb.task, CommandRouterAccess: pb.CommandRouterAccess_builder{Jwt: f.token(ctx), Url: f.worker()}.Build()}.Build(), nil
}

func (f *fake) worker() string { return strings.Replace(f.url, "http://", "https://", 1) }

// kill ends a sandbox behind the adapter's back.
func (f *fake) kill(id string, code int32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if sb := f.boxes[id]; sb != nil && sb.ended.IsZero() {
		sb.ended, sb.code = time.Now(), code
		sb.timer.Stop()
		sb.end()
	}
}

// find returns a sandbox of ctx's account by its ID or its task's. f.mu is held.
func (f *fake) find(ctx context.Context, id string) (*sandbox, error) {
	account := f.account(ctx)
	for _, sb := range f.boxes {
		if sb.account == account && (sb.id == id || sb.task == id) {
			return sb, nil
		}
	}
	return nil, status.Error(codes.NotFound, "no such sandbox")
}

func (sb *sandbox) result() *pb.GenericResult {
	if sb.ended.IsZero() {
		return nil
	}
	return pb.GenericResult_builder{Status: pb.GenericResult_GENERIC_STATUS_TERMINATED, Exitcode: sb.code}.Build()
}

func (f *fake) SandboxWaitV2(ctx context.Context, r *pb.SandboxWaitRequest) (*pb.SandboxWaitResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sb, err := f.find(ctx, r.GetSandboxId())
	if err != nil {
		return nil, err
	}
	return pb.SandboxWaitResponse_builder{Result: sb.result()}.Build(), nil
}

func (f *fake) SandboxTagsGetV2(ctx context.Context, r *pb.SandboxTagsGetRequest) (*pb.SandboxTagsGetResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sb, err := f.find(ctx, r.GetSandboxId())
	if err != nil {
		return nil, err
	}
	var tags []*pb.SandboxTag
	for k, v := range sb.tags {
		tags = append(tags, pb.SandboxTag_builder{TagName: k, TagValue: v}.Build())
	}
	return pb.SandboxTagsGetResponse_builder{Tags: tags}.Build(), nil
}

func (f *fake) SandboxTerminateV2(ctx context.Context, r *pb.SandboxTerminateRequest) (*pb.SandboxTerminateResponse, error) {
	f.mu.Lock()
	_, err := f.find(ctx, r.GetSandboxId())
	f.mu.Unlock()
	if err != nil {
		return nil, err
	}
	f.kill(r.GetSandboxId(), 137)
	return &pb.SandboxTerminateResponse{}, nil
}

func (f *fake) SandboxGetTaskIdV2(ctx context.Context, r *pb.SandboxGetTaskIdRequest) (*pb.SandboxGetTaskIdResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	sb, err := f.find(ctx, r.GetSandboxId())
	if err != nil {
		return nil, err
	}
	if res := sb.result(); res != nil {
		return pb.SandboxGetTaskIdResponse_builder{TaskResult: res}.Build(), nil
	}
	return pb.SandboxGetTaskIdResponse_builder{TaskId: &sb.task}.Build(), nil
}

func (f *fake) SandboxGetCommandRouterAccess(ctx context.Context, r *pb.SandboxGetCommandRouterAccessRequest) (*pb.SandboxGetCommandRouterAccessResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, err := f.find(ctx, r.GetSandboxId()); err != nil {
		return nil, err
	}
	return pb.SandboxGetCommandRouterAccessResponse_builder{Jwt: f.token(ctx), Url: f.worker()}.Build(), nil
}

// SandboxListV2 lists two sandboxes a page, the newest first.
func (f *fake) SandboxListV2(ctx context.Context, r *pb.SandboxListRequest) (*pb.SandboxListResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var found []*pb.SandboxInfo
	for _, sb := range f.boxes {
		made := float64(sb.made.Add(f.skew).UnixNano()) / 1e9
		shown := time.Since(sb.made) >= f.lag && (sb.ended.IsZero() || time.Since(sb.ended) < f.lag)
		if !shown || sb.app != r.GetAppId() || r.GetBeforeTimestamp() != 0 && made >= r.GetBeforeTimestamp() {
			continue
		}
		if slices.ContainsFunc(r.GetTags(), func(t *pb.SandboxTag) bool { return sb.tags[t.GetTagName()] != t.GetTagValue() }) {
			continue
		}
		found = append(found, pb.SandboxInfo_builder{Id: sb.id, CreatedAt: made}.Build())
	}
	slices.SortFunc(found, func(a, b *pb.SandboxInfo) int { return int((b.GetCreatedAt() - a.GetCreatedAt()) * 1e6) })
	return pb.SandboxListResponse_builder{Sandboxes: found[:min(2, len(found))]}.Build(), nil
}

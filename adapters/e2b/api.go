package e2b

import (
	"context"
	"iter"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/hosted"
)

// newSandbox asks for a sandbox.
type newSandbox struct {
	TemplateID string            `json:"templateID"`
	Timeout    int               `json:"timeout"` // always sent: the versions of the API have different defaults
	Metadata   map[string]string `json:"metadata"`
	EnvVars    map[string]string `json:"envVars,omitempty"`
	Internet   bool              `json:"allow_internet_access"`
	Network    network           `json:"network"`
	Secure     bool              `json:"secure,omitempty"` // of v1: the daemon wants its token
}

// network closes the public URLs of the ports, to which everybody who knows the sandbox's name would get.
type network struct {
	AllowPublicTraffic bool `json:"allowPublicTraffic"`
}

// A sandbox is what the service says of one. A create and a connect say its name alone.
type sandbox struct {
	SandboxID   string            `json:"sandboxID"`
	State       string            `json:"state"`
	Metadata    map[string]string `json:"metadata"`
	EndAt       time.Time         `json:"endAt"`
	AccessToken string            `json:"envdAccessToken"`
	Domain      string            `json:"domain"`
	CPUs        int64             `json:"cpuCount"`
	MemoryMB    int64             `json:"memoryMB"`
}

const paused = "paused" // State

// A metric is a sample of what a sandbox uses, in bytes.
type metric struct {
	Unix      int64 `json:"timestampUnix"`
	MemUsed   int64 `json:"memUsed"`
	MemTotal  int64 `json:"memTotal"`
	DiskUsed  int64 `json:"diskUsed"`
	DiskTotal int64 `json:"diskTotal"`
}

// refs are the names that the service gives, with the suffix of earlier versions: part of a host name and of a path.
var refs = regexp.MustCompile(`^[a-z0-9]{1,40}(-[a-z0-9]{1,40})?$`)

// object is sb for package hosted. Kind: Unavailable for a name that cannot be one.
func (sb sandbox) object() (hosted.Object, error) {
	if !refs.MatchString(sb.SandboxID) {
		return hosted.Object{}, sandboxer.E(sandboxer.Unavailable, nil, "the service sent an invalid sandbox ID").WithHint("check that the URL leads to the service")
	}
	return hosted.Object{Ref: sb.SandboxID, Tags: sb.Metadata}, nil
}

func at(ref string) string { return "/sandboxes/" + url.PathEscape(ref) }

// seconds is a lifetime as the service takes it, at least as long as d.
func seconds(d time.Duration) int { return max(1, int(math.Ceil(d.Seconds()))) }

// post sends a body to a path of v2, or another body to that of v1 if the service is too old for v2.
func post(ctx context.Context, x *extension, path string, v2, v1 any) (sandbox, error) {
	r := hosted.Request{Method: http.MethodPost, Path: "/v2" + path, Body: v2, Within: slow}
	sb, _, err := hosted.Send[sandbox](ctx, x.client, r)
	if hosted.Status(err) == http.StatusNotFound {
		r.Path, r.Body = path, v1
		sb, _, err = hosted.Send[sandbox](ctx, x.client, r)
	}
	return sb, err
}

// slow is how long the service may take for what moves the memory of a sandbox: some seconds for a GiB.
const slow = 50 * time.Second

// detail returns what the service says of a sandbox, and the time by its own clock.
func (x *extension) detail(ctx context.Context, ref string) (sandbox, time.Time, error) {
	sb, h, err := hosted.Send[sandbox](ctx, x.client, hosted.Request{Method: http.MethodGet, Path: at(ref)})
	if err != nil {
		return sb, time.Time{}, err
	}
	return sb, hosted.Clock(h), nil
}

func (x *extension) get(ctx context.Context, ref string) (hosted.Object, error) {
	sb, _, err := x.detail(ctx, ref)
	return hosted.Object{Ref: ref, Tags: sb.Metadata}, err
}

func (x *extension) remove(ctx context.Context, ref string) error {
	_, err := hosted.Call[struct{}](ctx, x.client, http.MethodDelete, at(ref), nil)
	x.forget(ctx, ref)
	return err
}

// list yields the sandboxes with these tags. The filter is encoded twice below the query.
func (x *extension) list(ctx context.Context, tags map[string]string) iter.Seq2[hosted.Object, error] {
	filter := url.Values{}
	for name, value := range tags {
		filter.Set(escaped(name), escaped(value))
	}
	return func(yield func(hosted.Object, error) bool) {
		for sb, err := range pages[sandbox](ctx, x, "/v2/sandboxes", url.Values{"metadata": {filter.Encode()}, "state": {"running,paused"}}) {
			o := hosted.Object{}
			if err == nil {
				o, err = sb.object()
			}
			if !yield(o, err) || err != nil {
				return
			}
		}
	}
}

func escaped(s string) string { return strings.ReplaceAll(url.QueryEscape(s), "+", "%20") }

// pages yields what the service lists at path.
func pages[T any](ctx context.Context, x *extension, path string, query url.Values) iter.Seq2[T, error] {
	query.Set("limit", "100")
	return hosted.Pages(func(next string) ([]T, string, error) {
		query.Del("nextToken")
		if next != "" {
			query.Set("nextToken", next)
		}
		items, h, err := hosted.Send[[]T](ctx, x.client, hosted.Request{Method: http.MethodGet, Path: path + "?" + query.Encode()})
		return items, h.Get("X-Next-Token"), err
	})
}

//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer/api"
	"github.com/sand-boxer/sandboxer/internal/measure"
	"github.com/sand-boxer/sandboxer/internal/strictjson"
)

const (
	deerflowStep    = "deer-flow's door"
	deerflowProfile = "profile.bench-deer-flow"

	doorExec     = "deer-flow: bash/exec of true by the door"
	doorOwnExec  = "deer-flow: exec of true by our API"
	doorRead     = "deer-flow: a file of 50 MB by the door"
	doorOwnRead  = "deer-flow: a file of 50 MB by our API"
	doorFileSize = 50_000_000

	replicas = 3 // as many as deer-flow keeps by itself
)

// deerflow measures deer-flow's door beside our own API, and then runs the scenarios that deer-flow
// measures its own backends by (its sandbox benchmark): how long an acquire and a run of each takes.
func (b *bench) deerflow(ctx context.Context) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	addr := l.Addr().String()
	l.Close()
	files := map[string]string{
		deerflowProfile: like(deerflowProfile, "idle: 10m\non_idle: pause\nauto_resume: true"),
		"config":        fmt.Sprintf("listen: %s\ndeerflow: true\ndeerflow_anonymous: true\ndeerflow_no_proxy: true\ndeerflow_profile: %s\n", addr, deerflowProfile),
	}
	return b.withServer(ctx, b.bin, "w", files, func(br *broker) error {
		d := &door{base: "http://" + addr, http: &http.Client{Timeout: time.Minute, Transport: &http.Transport{MaxIdleConnsPerHost: 16}}}
		defer d.http.CloseIdleConnections()
		if err := b.byDoor(ctx, br, d); err != nil {
			return err
		}
		return b.scenarios(ctx, br, d)
	})
}

// byDoor measures the same command and the same file by both ways into one sandbox.
func (b *bench) byDoor(ctx context.Context, br *broker, d *door) error {
	s, err := d.acquire(ctx, "door")
	if err != nil {
		return err
	}
	const file = "/tmp/fifty"
	if err := s.bash(ctx, fmt.Sprintf("head -c %d /dev/zero >%s", doorFileSize, file)); err != nil {
		return err
	}
	arm := func(name string, do func(ctx context.Context) error) Arm {
		return Arm{Name: name, To: b.to, Sample: func(ctx context.Context, to *Set) error {
			begin := time.Now()
			err := do(ctx)
			to.Took(name, time.Since(begin))
			return err
		}}
	}
	rate := func(name string, read func(ctx context.Context) (io.ReadCloser, error)) Arm {
		return Arm{Name: name, To: b.to, Sample: func(ctx context.Context, to *Set) error {
			begin := time.Now()
			r, err := read(ctx)
			if err != nil {
				return err
			}
			defer r.Close()
			n, err := io.Copy(io.Discard, r)
			if err == nil && n != doorFileSize {
				err = fmt.Errorf("%d bytes arrived; want %d", n, doorFileSize)
			}
			to.Rate(name, "MB/s", float64(n)/1e6/time.Since(begin).Seconds())
			return err
		}}
	}
	_, err = interleave(ctx, b.plan(b.rounds),
		arm(doorExec, func(ctx context.Context) error { return s.bash(ctx, "true") }),
		arm(doorOwnExec, func(ctx context.Context) error {
			x, err := br.Run(ctx, s.id, api.Exec{Args: []string{"bash", "-c", "true"}})
			if err == nil && x.Code != 0 {
				err = fmt.Errorf("true exits with %d: %s", x.Code, x.Stderr)
			}
			return err
		}),
		rate(doorRead, func(ctx context.Context) (io.ReadCloser, error) { return s.download(ctx, file) }),
		rate(doorOwnRead, func(ctx context.Context) (io.ReadCloser, error) { return br.ReadFile(ctx, s.id, file) }))
	return errors.Join(err, d.release(ctx, s.id))
}

// The workloads of deer-flow's benchmark.
var workloads = []struct{ name, command string }{
	{"noop", "true"},
	{"python_small", `python3 -c 'print(sum(range(1000)))'`},
	{"fs_1mb", "head -c 1000000 /dev/zero >/tmp/one && wc -c </tmp/one"},
	{"sleep_2s", "sleep 2"},
	{"state_reuse", "cat /tmp/state 2>/dev/null; date >/tmp/state"},
}

// scenarios are those of deer-flow's benchmark. What is acquired is as its provider acquires it: asked for
// by the ID of its thread, made if it is not there, and used when GET /v1/sandbox answers 200.
func (b *bench) scenarios(ctx context.Context, br *broker, d *door) error {
	rounds := max(3, b.rounds/5)
	if b.quick {
		rounds = b.count(2, 1)
	}
	series := func(scenario, what string) string { return "deer-flow, " + scenario + ": " + what }
	turn := func(scenario, thread, workload string) (*inside, error) {
		begin := time.Now()
		s, err := d.acquire(ctx, thread)
		if err != nil {
			return nil, err
		}
		acquired := time.Now()
		for _, w := range workloads {
			if w.name == workload {
				err = s.bash(ctx, w.command)
			}
		}
		b.to.Took(series(scenario, "acquire"), acquired.Sub(begin))
		b.to.Took(series(scenario, workload+" run"), time.Since(acquired))
		b.to.Took(series(scenario, "acquire and "+workload), time.Since(begin))
		return s, err
	}
	fresh := 0
	next := func(scenario string) string { fresh++; return fmt.Sprintf("%s-%d", scenario, fresh) }

	// One thread, again and again.
	for _, w := range workloads {
		for range rounds {
			if _, err := turn("warm_same_thread", "same", w.name); err != nil {
				return err
			}
		}
	}
	if err := d.release(ctx, threadID("same")); err != nil {
		return err
	}
	// Each turn another thread.
	for range rounds {
		s, err := turn("cold_unique_thread", next("cold"), "noop")
		if err != nil {
			return err
		}
		if err := d.release(ctx, s.id); err != nil {
			return err
		}
	}
	// More threads at once than deer-flow keeps sandboxes.
	many := b.count(4*replicas, replicas+1)
	for range max(1, rounds/3) {
		threads := make([]string, many)
		for i := range threads {
			threads[i] = next("miss")
		}
		_, failed := measure.Load{Count: many}.Run(ctx, func(i int) error { _, err := turn("warm_miss_many_threads", threads[i], "noop"); return err })
		for _, t := range threads {
			failed = append(failed, d.release(ctx, threadID(t)))
		}
		if err := errors.Join(failed...); err != nil {
			return err
		}
	}
	// A thread that comes back after its sandbox was paused for being idle.
	for range rounds {
		s, err := turn("idle_timeout", next("idle"), "state_reuse")
		if err != nil {
			return err
		}
		if _, err := br.Pause(ctx, s.id, api.PauseSandbox{Depth: "disk"}); err != nil {
			return err
		}
		begin := time.Now()
		err = s.bash(ctx, "cat /tmp/state")
		b.to.Took(series("idle_timeout", "first call after the pause"), time.Since(begin))
		if err := errors.Join(err, d.release(ctx, s.id)); err != nil {
			return err
		}
	}
	// As many at once as deer-flow keeps (three), and more: each goes when its turn is over.
	for range rounds {
		threads := make([]string, b.count(2*replicas, replicas+1))
		for i := range threads {
			threads[i] = next("pressure")
		}
		_, failed := measure.Load{Count: len(threads), Width: replicas}.Run(ctx, func(i int) error {
			_, err := turn("replica_pressure", threads[i], "fs_1mb")
			return errors.Join(err, d.release(ctx, threadID(threads[i])))
		})
		if err := errors.Join(failed...); err != nil {
			return err
		}
	}
	return nil
}

// door is deer-flow's client of its provisioner, in what the benchmark needs of it.
type door struct {
	base string
	http *http.Client
}

// threadID is the sandbox_id of a thread here: one that deer-flow could have sent.
func threadID(thread string) string { return "df-" + strings.ReplaceAll(thread, "_", "-") }

// call sends one request and decodes the answer into out.
func (d *door) call(ctx context.Context, method, url string, in, out any) error {
	var body io.Reader
	if in != nil {
		j, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(j)
	}
	res, err := d.send(ctx, method, url, body)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if out == nil {
		out = &struct{}{}
	}
	said, err := io.ReadAll(io.LimitReader(res.Body, 16<<20))
	if err == nil {
		_, err = strictjson.DecodeStored(said, out) // a later server may say more
	}
	return err
}

func (d *door) send(ctx context.Context, method, url string, body io.Reader) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		return nil, err
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	res, err := d.http.Do(r)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		said, _ := io.ReadAll(io.LimitReader(res.Body, 1000))
		res.Body.Close()
		return nil, fmt.Errorf("%s %s: %s: %s", method, r.URL.Path, res.Status, said)
	}
	return res, nil
}

// inside is a sandbox by its URL.
type inside struct {
	id, url string
	d       *door
}

// acquire is what deer-flow's provider does for a thread: create, and ask until it answers.
func (d *door) acquire(ctx context.Context, thread string) (*inside, error) {
	var made struct {
		ID     string `json:"sandbox_id"`
		URL    string `json:"sandbox_url"`
		Status string `json:"status"`
	}
	in := map[string]any{"sandbox_id": threadID(thread), "thread_id": thread, "user_id": "default"}
	if err := d.call(ctx, http.MethodPost, d.base+"/api/sandboxes", in, &made); err != nil {
		return nil, err
	}
	s := &inside{id: made.ID, url: made.URL, d: d}
	for deadline := time.Now().Add(time.Minute); ; {
		err := d.call(ctx, http.MethodGet, s.url+"/v1/sandbox", nil, nil)
		if err == nil || time.Now().After(deadline) {
			return s, err
		}
		if err := measure.Sleep(ctx, 10*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

func (d *door) release(ctx context.Context, id string) error {
	return d.call(context.WithoutCancel(ctx), http.MethodDelete, d.base+"/api/sandboxes/"+id, nil, nil)
}

func (s *inside) bash(ctx context.Context, command string) error {
	var out struct {
		Data struct {
			ExitCode *int   `json:"exit_code"`
			Status   string `json:"status"`
			Stderr   string `json:"stderr"`
		} `json:"data"`
	}
	err := s.d.call(ctx, http.MethodPost, s.url+"/v1/bash/exec", map[string]any{"command": command, "hard_timeout": 60.0}, &out)
	if err == nil && (out.Data.ExitCode == nil || *out.Data.ExitCode != 0) {
		err = fmt.Errorf("%s: %s: %s", command, out.Data.Status, out.Data.Stderr)
	}
	return err
}

func (s *inside) download(ctx context.Context, name string) (io.ReadCloser, error) {
	res, err := s.d.send(ctx, http.MethodGet, s.url+"/v1/file/download?path="+name, nil)
	if err != nil {
		return nil, err
	}
	return res.Body, nil
}

func (b *bench) deerflowBars() {
	m := b.r.median
	b.r.most(doorExec+" / by our API", m(doorExec)/m(doorOwnExec), 1.3, "x")
	b.r.least(doorRead+" / by our API", m(doorRead)/m(doorOwnRead), 0.5, "x")
}

package server

import (
	"context"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/edge"
	"github.com/sand-boxer/sandboxer/internal/manager"
)

// Metrics are the measurements served at /metrics.
type Metrics struct {
	reg          *prometheus.Registry
	backend      *prometheus.HistogramVec
	requests     *prometheus.HistogramVec
	oomKills     *prometheus.CounterVec
	pooled       *prometheus.CounterVec
	overrun      *prometheus.CounterVec
	abandoned    *prometheus.CounterVec
	abandonedNow *prometheus.GaugeVec
}

// NewMetrics returns an empty set.
func NewMetrics() *Metrics {
	m := &Metrics{
		reg: prometheus.NewRegistry(),
		backend: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "sandboxer_backend_call_duration_seconds", Help: "Calls of extensions by kind of error (ok for none).",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300},
		}, []string{"extension", "op", "kind"}),
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "sandboxer_http_request_duration_seconds", Help: "HTTP requests, streams included, by route and status.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 60, 600},
		}, []string{"route", "status"}),
		oomKills: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sandboxer_oom_kills_total", Help: "Commands and sandboxes (what) that a memory limit killed; a sandbox that died of its command counts as both.",
		}, []string{"extension", "what"}),
		pooled: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sandboxer_pool_creates_total", Help: "Creates of profiles that keep a pool, by where the sandbox came from: pool or cold.",
		}, []string{"profile", "from"}),
		overrun: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sandboxer_overrun_credits_total", Help: "Credits that sandboxes cost beyond what was on hold for them, which no tenant pays.",
		}, []string{"extension"}),
		abandoned: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "sandboxer_backend_calls_abandoned_total", Help: "Calls of extensions that did not stop at their deadline or when their caller left, and were left behind.",
		}, []string{"extension", "op"}),
		abandonedNow: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "sandboxer_backend_calls_abandoned", Help: "Calls of extensions that were left behind and have not ended.",
		}, []string{"extension", "op"}),
	}
	m.reg.MustRegister(m.abandoned, m.abandonedNow, m.oomKills, m.pooled, m.overrun, m.backend, m.requests, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Observe notes one finished backend call; it is for backend.Options.Observe.
func (m *Metrics) Observe(extension, op string, kind sandboxer.Kind, took time.Duration) {
	if kind == "" {
		kind = "ok"
	}
	m.backend.WithLabelValues(extension, op, string(kind)).Observe(took.Seconds())
}

// Abandoned notes that a backend call was abandoned (1), or that an abandoned one has ended
// (-1); it is for backend.Options.Abandoned.
func (m *Metrics) Abandoned(extension, op string, change int) {
	if change > 0 {
		m.abandoned.WithLabelValues(extension, op).Inc()
	}
	m.abandonedNow.WithLabelValues(extension, op).Add(float64(change))
}

// OOMKilled notes that a memory limit killed a command or a sandbox; it is for
// manager.Options.OOMKilled.
func (m *Metrics) OOMKilled(extension, what string) {
	m.oomKills.WithLabelValues(extension, what).Inc()
}

// Pooled notes a create of a profile that keeps a pool; it is for
// manager.Options.Pooled.
func (m *Metrics) Pooled(profile string, warm bool) {
	from := "cold"
	if warm {
		from = "pool"
	}
	m.pooled.WithLabelValues(profile, from).Inc()
}

// Overrun notes what a sandbox cost beyond its hold; it is for manager.Options.Overrun.
func (m *Metrics) Overrun(extension string, beyond sandboxer.Credits) {
	m.overrun.WithLabelValues(extension).Add(float64(beyond) / float64(sandboxer.Credit))
}

// Request notes a request that ended; it is for edge.Options.Observe.
func (m *Metrics) Request(route string, status int, took time.Duration) {
	m.requests.WithLabelValues(route, strconv.Itoa(status)).Observe(took.Seconds())
}

// handler serves the metrics; count gives the sandboxes of every tenant by state,
// extensions all extensions, and sinks the receivers of usage rows.
func (m *Metrics) handler(count func(context.Context) (map[sandboxer.State]int, error), extensions func(context.Context) []sandboxer.ExtensionInfo,
	sinks func(context.Context) ([]manager.SinkStatus, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Counted for this request, with its principal: a collector has no ctx, and its error would be shown unchanged.
		counts, err := count(r.Context())
		var receivers []manager.SinkStatus
		if err == nil {
			receivers, err = sinks(r.Context())
		}
		if err != nil {
			edge.Fail(w, r, err)
			return
		}
		own := prometheus.NewRegistry()
		states := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "sandboxer_sandboxes", Help: "Live sandboxes by state."}, []string{"state"})
		own.MustRegister(states)
		for st, n := range counts {
			states.WithLabelValues(string(st)).Set(float64(n))
		}
		up := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "sandboxer_extension_up", Help: "Whether an extension can be used: 1, or 0 while opening it is tried again."}, []string{"extension"})
		failing := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "sandboxer_extension_failing", Help: "Whether routes skip an extension because it failed several times in a row: 1, or else 0."}, []string{"extension"})
		own.MustRegister(up, failing)
		is := map[bool]float64{true: 1}
		for _, e := range extensions(r.Context()) {
			up.WithLabelValues(e.ID).Set(is[e.Problem == ""])
			failing.WithLabelValues(e.ID).Set(is[!e.FailingUntil.IsZero()])
		}
		behind := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "sandboxer_sink_backlog_rows", Help: "Usage rows that are not yet delivered to a sink of sinks.yaml, without its dead letters."}, []string{"sink"})
		dead := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "sandboxer_sink_dead_letters", Help: "Usage rows that a sink of sinks.yaml refused."}, []string{"sink"})
		own.MustRegister(behind, dead)
		for _, st := range receivers {
			if st.Declared() { // at most MaxSinks; nothing is delivered to others
				behind.WithLabelValues(st.ID()).Set(float64(st.Behind))
				dead.WithLabelValues(st.ID()).Set(float64(st.DeadLetters))
			}
		}
		promhttp.HandlerFor(prometheus.Gatherers{m.reg, own}, promhttp.HandlerOpts{DisableCompression: true}).ServeHTTP(w, r)
	})
}

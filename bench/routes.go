//go:build linux

package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/sand-boxer/sandboxer/internal/measure"
)

const (
	routesStep   = "routes and usage rows"
	routeProfile = "profile.bench-route"

	routeOf100 = "route over 100 candidates"
	viaRoute   = "local by a route of one"
	rowsKept   = "manager on the fake, 64 clients, no sink: lives"
	rowsSent   = "manager on the fake, 64 clients, a sink: lives"
	rowsTaken  = "manager on the fake, 64 clients, a sink: rows at the receiver"
	rowsWrong  = "manager on the fake, 64 clients, a sink: rows missing at the receiver, or twice there"
)

// oneCandidate is a profile that says what profile.local says, with a route to its extension.
func oneCandidate() string {
	return strings.Replace(like(routeProfile, ""), "extension: ext.local", "route: {policy: burst, candidates: [{extension: ext.local}]}", 1)
}

// routes measures what a decision about candidates costs, and usage rows with and without a sink.
func (b *bench) routes(ctx context.Context) error {
	if err := b.decisions(ctx); err != nil {
		return err
	}
	if err := b.usageRows(ctx); err != nil {
		return err
	}
	return b.withServer(ctx, b.bin, "k", map[string]string{routeProfile: oneCandidate()}, func(br *broker) error {
		arm := func(profile, name string) Arm {
			return Arm{Name: name, To: b.to, Sample: func(ctx context.Context, to *Set) error { return br.life(ctx, to, profile, name) }}
		}
		_, err := interleave(ctx, b.plan(b.rounds), arm(plainProfile, viaAPI+", among routes"), arm(routeProfile, viaRoute))
		return err
	})
}

// decisions runs the benchmark of the function that decides, which asks nobody.
func (b *bench) decisions(ctx context.Context) error {
	test := b.path("spec.test")
	if err := compile(ctx, "test", "-c", "-vet=off", "-trimpath", "-o", test, module+"/internal/spec"); err != nil {
		return err
	}
	for range b.count(10, 1) {
		out, _, err := b.benchmark(ctx, test, "BenchmarkRoute", fmt.Sprint(b.count(2000, 20), "x"))
		if err != nil {
			return err
		}
		for _, figures := range out {
			b.to.Add(routeOf100, "ms", figures["ns/op"]/1e6)
		}
	}
	return nil
}

// usageRows lives lives on the manager by turns without a sink and with one, whose receiver is in the same process.
func (b *bench) usageRows(ctx context.Context) error {
	test := b.path("rows.test")
	if err := compile(ctx, "test", "-c", "-vet=off", "-trimpath", "-o", test, module+"/internal/manager"); err != nil {
		return err
	}
	arm := func(name, which string) Arm {
		return Arm{Name: name, To: b.to, Sample: func(ctx context.Context, to *Set) error {
			out, _, err := b.benchmark(ctx, test, "BenchmarkUsageRows$/^"+which, fmt.Sprint(b.count(1000, 20), "x"))
			for _, figures := range out {
				to.Rate(name, "1/s", figures["lives/s"])
				if rate, ok := figures["rows/s"]; ok {
					to.Rate(rowsTaken, "1/s", rate)
					to.Add(rowsWrong, "", figures["wrong-rows"])
				}
			}
			return err
		}}
	}
	_, err := interleave(ctx, b.plan(b.count(max(5, b.rounds/2), 1)), arm(rowsKept, "kept"), arm(rowsSent, "delivered"))
	return err
}

func (b *bench) routeBars() {
	r := b.r
	r.most(routeOf100, r.median(routeOf100), 1, "ms")
	r.most(viaRoute+": create / by its extension", b.bounded(viaRoute+": create", viaAPI+", among routes: create"), 1.05, "x")
	r.least(rowsSent+" / no sink", b.bounded(rowsSent, rowsKept), 0.8, "x")
	r.least(rowsTaken+" / lives", b.bounded(rowsTaken, rowsSent), 0.5, "x")
	r.most(rowsWrong, r.percentile(rowsWrong, 100), 0, "")
}

// bounded is the ratio of the medians of two series, NaN if one was not measured. Its bounds are a fact of the report: on a busy
// machine they are wide.
func (b *bench) bounded(of, by string) float64 {
	if x, y := b.to.find(by), b.to.find(of); x != nil && y != nil {
		z := measure.RatioOf(x.Samples, y.Samples)
		b.r.fact(of+" / "+by, "%.3f (95 %%: %.3f to %.3f)", z.Value, z.Low, z.High)
	}
	return b.r.median(of) / b.r.median(by)
}

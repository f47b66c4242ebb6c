package spec

import (
	"testing"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// TestDigestsStay: a request that is sent again after an upgrade is still known by its
// idempotency key. The digests are those of 6c37cc0; they must never be others.
func TestDigestsStay(t *testing.T) {
	create := sandboxer.CreateRequest{
		Profile: "profile.local", Inputs: map[string]string{"repo": "/src/<app>", "branch": "main"}, Name: "build", TTL: 90 * time.Minute,
		Consumer: sandboxer.Consumer{ID: "me", Kind: "ci", Meta: map[string]string{"job": "7"}}, Labels: map[string]string{"a": "b"},
		Env:     map[string]string{"TOKEN": "geheim", "A": "ünï"},
		Limits:  sandboxer.Limits{MilliCPU: 500, MemoryBytes: 1 << 30, DiskBytes: 1 << 31, PIDs: 9, GPUs: 1},
		Network: &sandboxer.NetworkPolicy{Mode: sandboxer.NetworkAllow, Allow: []string{"a.example", "b.example:443"}},
		Command: []string{"sleep", "9"}, Image: "docker.io/library/python:3.13", User: "1000:1000",
		Mounts: []sandboxer.Mount{{Source: "/srv", Target: "/data", ReadOnly: true}, {Source: "/a", Target: "/b"}},
		Host:   "build-1", MaxCost: 250_000, Thread: sandboxer.Thread{User: "u", ID: "t-1"}, Key: "k", NoWaiting: true,
	}
	restore := sandboxer.RestoreRequest{
		Profile: "profile.other", Kind: sandboxer.SnapshotPortable, Inputs: create.Inputs, Host: create.Host, Name: create.Name, TTL: create.TTL,
		Consumer: create.Consumer, Labels: create.Labels, Env: create.Env, MaxCost: create.MaxCost, Key: "k", NoWaiting: true,
	}
	fork := sandboxer.ForkRequest{Count: 3, TTL: create.TTL, Labels: create.Labels, Env: create.Env, MaxCost: create.MaxCost, Key: "k"}
	for _, tt := range []struct{ name, got, want string }{
		{"create", createDigest(create), "3e0a1d2e20ce1025fe6095ac4e676e78f5507cad436942da40aad3ddec7e17ae"},
		{"create of nothing but a profile", createDigest(sandboxer.CreateRequest{Profile: "local"}), "5ecda787e51a590af90a522264b84a48da429ab4475f34348877334c82a1cf61"},
		{"restore", restoreDigest("snap-7k2mq0xa4t9c", restore), "e153e1eff7ccab101bba641d451a29c3c017f0abfa895554821ab044410e6c50"},
		{"restore of nothing", restoreDigest("snap-7k2mq0xa4t9c", sandboxer.RestoreRequest{}), "da8787d7ea063dd4e00910793e7576c2e444990b55b4053cd9a66a7851747f65"},
		{"fork", ForkDigest("7k2mq0xa", fork), "82c4cece4a3e6d43b368e5090062315fcc64ed8f1d47ec4db90b86b5cf472645"},
		{"fork of nothing", ForkDigest("7k2mq0xa", sandboxer.ForkRequest{Count: 1}), "4f1f77870471bb41049f20d348bd515437d42e950b8dca4add2d081b8ef22730"},
		{"claim", sandboxer.Spec{ID: "x", Generation: 2, Profile: sandboxer.Profile{ID: "profile.local", TTL: time.Hour, MaxPaused: time.Hour, Price: sandboxer.Price{PerHour: 7}},
			Inputs: create.Inputs, Consumer: create.Consumer, Env: create.Env, Limits: create.Limits, Network: *create.Network, Mounts: create.Mounts}.ClaimDigest(), "ef6da49fc88d3ffdee03014ea18dad440ad9ba8aebceff09171ce7bca719feac"},
	} {
		if tt.got != tt.want {
			t.Errorf("the digest of %s is %s; want %s", tt.name, tt.got, tt.want)
		}
	}
}

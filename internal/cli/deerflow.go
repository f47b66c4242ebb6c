package cli

import (
	"net/netip"
	"net/url"
	"path/filepath"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/provisioner"
)

// deerflow are the options of deer-flow's doors, from the settings. Kind: Invalid.
func (b *broker) deerflow(s *settings) (*provisioner.Options, error) {
	o := &provisioner.Options{
		Profile: s.get("deerflow_profile"), UserData: s.get("deerflow_user_data"), Skills: s.get("deerflow_skills"),
		IgnoreMounts: s.get("deerflow_ignore_mounts") == "true", Anonymous: s.get("deerflow_anonymous") == "true",
		StatusOK: s.get("deerflow_status_ok") == "true", Owner: b.owner, SpoolDir: b.cfg.Dir, Log: b.cfg.Log,
	}
	prof, err := b.cat.Profile(o.Profile)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "deerflow_profile: %s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	}
	o.Profile = prof.ID
	if o.MountRoots, err = mountRoots(s.get("deerflow_mount_roots")); err != nil {
		return nil, err
	}
	if o.PublicURL, err = publicURL(s.get("deerflow_public_url")); err != nil {
		return nil, err
	}
	return o, nil
}

// checkAnonymous refuses requests without a key where a proxy may be in front of the server. The server cannot
// distinguish a proxy's requests from those of a program of this machine. Kind: Invalid.
func checkAnonymous(s *settings, o *serveOptions) error {
	if s.get("deerflow_anonymous") != "true" {
		return nil
	}
	with := ""
	u, err := publicURL(s.get("deerflow_public_url"))
	switch {
	case err != nil:
		return err
	case o.insecure:
		with = "insecure"
	case len(o.hosts) > 0:
		with = "hosts"
	case u != nil && !isLoopback(u.Hostname()):
		with = "deerflow_public_url"
	}
	if with != "" {
		return invalid("deerflow_anonymous conflicts with %s, which means that clients reach the server through a proxy or from other machines: their requests would need no key", with).
			WithHint("give deer-flow a key, and leave deerflow_anonymous out: sandboxer key create deer-flow")
	}
	if s.get("deerflow_no_proxy") != "true" {
		return invalid("deerflow_anonymous lets in every client of a proxy on this machine, and no setting says that there is no proxy").
			WithHint("give deer-flow a key (sandboxer key create deer-flow); or set deerflow_no_proxy: true if no proxy leads to the server")
	}
	return nil
}

func isLoopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return strings.EqualFold(host, "localhost") || err == nil && ip.Unmap().IsLoopback()
}

func checkMountRoots(s string) error { _, err := mountRoots(s); return err }

// mountRoots reads DIR[:ro],….
func mountRoots(s string) (roots []provisioner.MountRoot, _ error) {
	if s == "" {
		return nil, nil
	}
	for one := range strings.SplitSeq(s, ",") {
		dir, readOnly := strings.CutSuffix(strings.TrimSpace(one), ":ro")
		if !filepath.IsAbs(dir) || filepath.Clean(dir) != dir || dir == "/" {
			return nil, invalid("%q is not a clean absolute path below /", dir).WithHint("write directories with commas between, each perhaps with :ro behind: /srv/deer-flow,/srv/skills:ro")
		}
		roots = append(roots, provisioner.MountRoot{Path: dir, ReadOnly: readOnly})
	}
	return roots, nil
}

func checkPublicURL(s string) error { _, err := publicURL(s); return err }

func publicURL(s string) (*url.URL, error) {
	if s == "" {
		return nil, nil
	}
	u, err := url.Parse(s)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, invalid("%q is not an address of the server", s).WithHint("write for example https://sandboxer.example.org, or http://10.0.0.5:8080")
	}
	u.Path, u.RawPath = strings.TrimSuffix(u.Path, "/"), ""
	return u, nil
}

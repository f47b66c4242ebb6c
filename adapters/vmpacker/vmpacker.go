// Package vmpacker puts sandboxes on virtual machines, in one of two ways.
//
// Attached: the sandbox is a workspace, /build/sbx-<id>, on an existing machine, reached
// over SSH, by an alias or through a tunnel. Teardown ends the sandbox's processes and
// removes the workspace; the machine stays. Several sandboxes on one machine are isolated
// only like its processes and directories.
//
// Managed: the sandbox is a machine of its own, started with qemu from an image that
// Packer builds when it is missing, and removed with the sandbox. It can be paused, and
// saved with its memory.
//
// A managed machine has the note <id>.g<n>, written before anything is made of it. Below
// the extension's private directory:
//
//	vm/<id>.g<n>/   disk, seed and control socket of a managed machine
//	image/<key>.*   images that Packer built, with their records and logs
//	snap/<id>/      saved machines
//	key             for entering managed machines
package vmpacker

import (
	"path/filepath"
	"regexp"

	"github.com/sand-boxer/sandboxer"
)

// Config is the extension's `config:` block.
type Config struct {
	VMs          map[string]VM    `yaml:"vms" json:"vms,omitempty" keys:"label" help:"Machines to attach to, by alias (the input vm)."`
	Targets      []string         `yaml:"targets" json:"targets,omitempty" help:"Patterns of SSH targets that callers can name, in addition to the machines of vms and those added with host add, such as ci@*.example.org; a pattern without an account means the account that the SSH configuration names. Empty means none. Administrators and profiles can name any target whose host key is trusted."`
	WorkspaceDir string           `yaml:"workspace_dir" json:"workspace_dir,omitempty" format:"abspath" help:"Directory on the machine in which workspaces are made."`
	Capacity     int              `yaml:"capacity" json:"capacity,omitempty" min:"1" help:"Maximum number of sandboxes on one machine."`
	Tools        []string         `yaml:"tools" json:"tools,omitempty" help:"Commands that a machine must have."`
	MinFree      int64            `yaml:"min_free" json:"min_free,omitempty" unit:"bytes" help:"Free disk space that a machine needs where workspaces are made."`
	Images       map[string]Image `yaml:"images" json:"images,omitempty" keys:"label" help:"Images of machines that are started for one sandbox, by the name that a profile's image gives."`
	MaxVMs       int              `yaml:"max_vms" json:"max_vms,omitempty" min:"1" help:"Maximum number of machines that are started for one sandbox."`
	Accel        string           `yaml:"accel" json:"accel,omitempty" enum:"auto,kvm,tcg" help:"How machines that are started for one sandbox run; auto uses KVM only where a test guest runs in it."`
	Agent        string           `yaml:"agent" json:"agent,omitempty" help:"Path of sandboxer-agent for the platform of the machines; empty means next to the running program. Without an agent, sandboxes have neither processes that outlive their callers nor watches of files."`
	SSHConfig    string           `yaml:"ssh_config" json:"ssh_config,omitempty" help:"SSH configuration file; empty means the account's and the system's."`
}

// VM is a machine to attach to.
type VM struct {
	SSHTarget    string   `yaml:"ssh_target" json:"ssh_target,omitempty" format:"line" help:"The target as in ssh TARGET; empty means the alias itself, from ~/.ssh/config."`
	SSHPort      int      `yaml:"ssh_port" json:"ssh_port,omitempty" min:"1" max:"65535" help:"Port of its SSH server; without it the one of the SSH configuration."`
	TunnelPort   int      `yaml:"tunnel_port" json:"tunnel_port,omitempty" min:"1" max:"65535" help:"Port of this machine that leads to the SSH server of the machine."`
	IdentityFile string   `yaml:"identity_file" json:"identity_file,omitempty" format:"abspath" help:"Private key to log in with; empty leaves it to the SSH configuration."`
	HostKeys     []string `yaml:"host_keys" json:"host_keys,omitempty" help:"The machine's public keys, as authorized_keys lines; empty means those of known_hosts."`
	WorkspaceDir string   `yaml:"workspace_dir" json:"workspace_dir,omitempty" format:"abspath" help:"In place of the extension's workspace_dir."`
	Capacity     int      `yaml:"capacity" json:"capacity,omitempty" min:"1" help:"In place of the extension's capacity."`
	Tools        []string `yaml:"tools" json:"tools,omitempty" help:"Commands that it must have, in addition to the extension's tools."`
}

// names of directories are used in awk and in shell patterns.
var plainPath = regexp.MustCompile(`^(/[A-Za-z0-9._-]+)+$`)

func checkBase(dir string) error {
	if !plainPath.MatchString(dir) || filepath.Clean(dir) != dir {
		return sandboxer.E(sandboxer.Invalid, nil, "workspace_dir: %q is not a clean absolute path of letters, digits, dots, dashes and underscores", dir)
	}
	return nil
}

// Validate implements the check of sandboxer.Typed.
func (c *Config) Validate() error {
	if err := checkBase(c.WorkspaceDir); err != nil {
		return err
	}
	for name, vm := range c.VMs {
		if vm.WorkspaceDir != "" {
			if err := checkBase(vm.WorkspaceDir); err != nil {
				return err
			}
		}
		if vm.TunnelPort != 0 && vm.SSHPort != 0 {
			return sandboxer.E(sandboxer.Invalid, nil, "vms: %s has both an ssh_port and a tunnel_port", name)
		}
	}
	for name, img := range c.Images {
		if (img.File == "") == (img.Packer == nil) {
			return sandboxer.E(sandboxer.Invalid, nil, "images: %s needs either a file or packer", name)
		}
		if img.Kernel == "" && (img.Initrd != "" || img.Append != "") {
			return sandboxer.E(sandboxer.Invalid, nil, "images: %s has an initrd or append without a kernel", name)
		}
	}
	for _, p := range c.Targets {
		if _, err := filepath.Match(p, ""); err != nil {
			return sandboxer.E(sandboxer.Invalid, err, "targets: %q is not a pattern", p)
		}
	}
	return nil
}

// Adapter is this package's entry in package adapters.
var Adapter = sandboxer.Typed(sandboxer.Adapter{
	Kind:  "vm-packer",
	Title: "Virtual machines",
	Help: "Attaches workspaces to virtual machines that exist and are reached over SSH; when a sandbox ends, its processes " +
		"and its workspace are removed and the machine stays. Or starts a machine for each sandbox, from an image that Packer builds when it is missing.",
	Handlers:  []string{"sandboxer.extensions.vm_packer:*"},
	Isolation: []sandboxer.Isolation{sandboxer.IsolationProcess, sandboxer.IsolationVM},
	Pricing:   []sandboxer.PricingModel{sandboxer.PricingSelfHosted},
	Capabilities: []sandboxer.Capability{sandboxer.CanExec, sandboxer.CanFiles, sandboxer.CanDial, sandboxer.CanProbe,
		sandboxer.CanDiscover, sandboxer.CanList, sandboxer.CanSnapshot, sandboxer.CanPause, sandboxer.CanCapacity, sandboxer.CanStats,
		sandboxer.CanAgent, sandboxer.CanProcesses, sandboxer.CanWatch},
	Inputs: []sandboxer.Input{
		{Name: "vm", OneOf: "machine", Restricted: true, Help: "alias of the machine to attach to: one of the extension's vms, a host added with host add, or an alias of ~/.ssh/config"},
		{Name: "ssh_target", OneOf: "machine", Restricted: true, Help: "the machine to attach to, as in ssh TARGET"},
		{Name: "ssh_port", Restricted: true, Help: "port of the machine's SSH server"},
		{Name: "tunnel_port", OneOf: "machine", Restricted: true, Help: "port of this machine that leads to the SSH server of the machine to attach to, such as the end of ssh -R from a machine behind a firewall"},
		{Name: "workspace_dir", Restricted: true, Help: "directory on the machine in which the workspace is made; /build if nothing else is configured"},
		{Name: "repo", Restricted: true, Help: "directory of this machine, absolute, that is copied into the workspace"},
		{Name: "sandbox_id", Help: "the sandbox's ID; without it a new one is made"},
	},
}, Config{WorkspaceDir: "/build", Capacity: 1, MinFree: 64 << 20, MaxVMs: 4, Accel: "auto"}, open)

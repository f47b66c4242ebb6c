package sshrun

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// configFiles are the files of an ssh configuration that exist, in their order.
func configFiles(config string) []string {
	files := []string{config}
	switch config {
	case "none":
		return nil
	case "":
		files = []string{"/etc/ssh/ssh_config"}
		if home, err := os.UserHomeDir(); err == nil {
			files = []string{filepath.Join(home, ".ssh", "config"), files[0]}
		}
	}
	return slices.DeleteFunc(files, func(f string) bool { _, err := os.Stat(f); return config == "" && err != nil })
}

// settings are the options of a configuration for one host: lower-case keyword to its
// values.
type settings map[string][]string

func (s settings) one(key string) string {
	if v := s[key]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// resolve returns what the configuration says about t: by asking ssh where there is
// one, else by reading what can be read without it.
func resolve(ctx context.Context, program string, opts Options, t Target) (settings, error) {
	if program != "" {
		s, err := askSSH(ctx, program, opts.Config, t)
		if err != nil {
			return nil, err
		}
		return s, refuse(ctx, program, s, t)
	}
	s := settings{}
	_, host := t.split()
	for _, f := range configFiles(opts.Config) {
		if err := s.read(f, host); err != nil {
			return nil, err
		}
	}
	for k := range s {
		if !honoured[k] && !harmless[k] {
			return nil, refused(t, k)
		}
	}
	return s, check(s, t)
}

func askSSH(ctx context.Context, program, config string, t Target) (settings, error) {
	args := []string{"-G"}
	if config != "" {
		args = append(args, "-F", config)
	}
	cmd := exec.CommandContext(ctx, program, append(args, "--", t.Addr)...)
	out, err := cmd.Output()
	if e := (*exec.ExitError)(nil); errors.As(err, &e) {
		return nil, t.fault(ErrUnreachable, "ssh does not take its configuration: "+tidy(string(e.Stderr)))
	}
	if err != nil {
		return nil, err
	}
	s := settings{}
	for line := range strings.Lines(string(out)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		s[key] = append(s[key], value)
	}
	return s, nil
}

// honoured are the options that the native transport acts on; harmless those that
// change nothing about whether and where one gets in.
var (
	honoured = words(`host hostname user port identityfile identitiesonly identityagent certificatefile proxyjump
userknownhostsfile globalknownhostsfile hostkeyalias stricthostkeychecking`)
	harmless = words(`addkeystoagent batchmode canonicaldomains checkhostip clearallforwardings compression connectionattempts
connecttimeout controlmaster controlpath controlpersist dynamicforward escapechar exitonforwardfailure fingerprinthash forkafterauthentication
forwardagent forwardx11 forwardx11timeout forwardx11trusted gatewayports gssapiauthentication gssapidelegatecredentials
hashknownhosts include ipqos kbdinteractiveauthentication localcommand localforward loglevel logverbose nohostauthenticationforlocalhost
numberofpasswordprompts passwordauthentication permitlocalcommand permitremoteopen preferredauthentications pubkeyauthentication
rekeylimit remotecommand remoteforward requesttty sendenv serveralivecountmax serveraliveinterval sessiontype setenv stdinnull
streamlocalbindmask streamlocalbindunlink syslogfacility tcpkeepalive tunnel tunneldevice updatehostkeys usekeychain user verifyhostkeydns
visualhostkey xauthlocation addressfamily hostbasedauthentication enableescapecommandline challengeresponseauthentication
canonicalizefallbacklocal canonicalizehostname canonicalizemaxdots canonicalizepermittedcnames proxyusefdpass securitykeyprovider
casignaturealgorithms ciphers hostkeyalgorithms hostbasedacceptedalgorithms kexalgorithms macs pubkeyacceptedalgorithms requiredrsasize obscurekeystroketiming channeltimeout versionaddendum warnweakcrypto refuseconnection tag ignoreunknown`)
)

func words(s string) map[string]bool {
	m := map[string]bool{}
	for _, w := range strings.Fields(s) {
		m[w] = true
	}
	return m
}

// exact are options that must have the value ssh would give them by itself: the
// native transport has its own and would not keep to another.
var exact = []string{"ciphers", "macs", "kexalgorithms", "hostkeyalgorithms", "pubkeyacceptedalgorithms", "casignaturealgorithms", "requiredrsasize"}

// refuse returns an error that names the first option which the native transport
// cannot honour.
func refuse(ctx context.Context, program string, s settings, t Target) error {
	plain, err := askSSH(ctx, program, "none", t)
	if err != nil {
		return err
	}
	for _, k := range exact {
		if !slices.Equal(s[k], plain[k]) {
			return refused(t, k)
		}
	}
	return check(s, t)
}

func check(s settings, t Target) error {
	for _, k := range []string{"proxycommand", "pkcs11provider", "knownhostscommand", "revokedhostkeys", "bindaddress", "bindinterface"} {
		if v := s.one(k); v != "" && v != "none" {
			return refused(t, k)
		}
	}
	for _, k := range exact {
		// Without ssh its own values are not known; any that is set is another.
		if v, ok := s["\x00"+k]; ok && len(v) > 0 {
			return refused(t, k)
		}
	}
	return nil
}

func refused(t Target, option string) error {
	return unsupported("the native ssh transport cannot honour %q, which the configuration sets for host %s", option, t.Name)
}

// read adds what file says about host; what is there already stays. It knows Host,
// Include and the plain options. Match needs ssh, and is refused.
func (s settings) read(file, host string) error {
	data, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return invalid("ssh configuration %s cannot be read", file)
	}
	applies := true
	for n, line := range strings.Split(string(data), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		i := strings.IndexAny(line, " \t=")
		if i < 0 {
			return invalid("%s:%d: option %q has no value", file, n+1, line)
		}
		key := strings.ToLower(line[:i])
		value := strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line[i:]), "="))
		switch key {
		case "host":
			applies = false
			for pattern := range strings.FieldsSeq(value) {
				not := strings.HasPrefix(pattern, "!")
				ok, err := filepath.Match(strings.TrimPrefix(pattern, "!"), host)
				if err != nil {
					return invalid("%s:%d: %q is not a pattern", file, n+1, pattern)
				}
				if ok && not {
					applies = false
					break
				}
				applies = applies || ok
			}
		case "match":
			if !strings.EqualFold(value, "all") {
				return unsupported("%s:%d: Match cannot be judged without an ssh program", file, n+1)
			}
			applies = true
		case "include":
			if !applies {
				continue
			}
			for pattern := range strings.FieldsSeq(value) {
				pattern = home(strings.Trim(pattern, `"`))
				if !filepath.IsAbs(pattern) {
					pattern = filepath.Join(filepath.Dir(file), pattern)
				}
				found, err := filepath.Glob(pattern)
				if err != nil {
					return invalid("%s:%d: %q is not a pattern", file, n+1, pattern)
				}
				for _, f := range found {
					if f == file {
						continue
					}
					if err := s.read(f, host); err != nil {
						return err
					}
				}
			}
		default:
			many := key == "identityfile" || key == "certificatefile"
			if _, set := s[key]; applies && (many || !set) {
				s[key] = append(s[key], strings.Trim(value, `"`))
				if slices.Contains(exact, key) {
					s["\x00"+key] = []string{value}
				}
			}
		}
	}
	return nil
}

// home expands a leading ~.
func home(name string) string {
	if rest, ok := strings.CutPrefix(name, "~/"); ok {
		if dir, err := os.UserHomeDir(); err == nil {
			return filepath.Join(dir, rest)
		}
	}
	return name
}

// expand replaces the tokens that ssh knows in file names.
func expand(name, host, port, user string) string {
	dir, _ := os.UserHomeDir()
	return strings.NewReplacer("%%", "%", "%d", dir, "%h", host, "%p", port, "%r", user, "%n", host).Replace(home(name))
}

func portOr(s string, def int) string {
	if n, err := strconv.Atoi(s); err == nil && n > 0 {
		return s
	}
	return fmt.Sprint(def)
}

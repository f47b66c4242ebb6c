package aioserver

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

// A request to write is read as JSON is.
func FuzzReadWrite(f *testing.F) {
	for _, s := range []string{
		`{"file":"/a","content":"x\u00e4\ud83d\ude00\n\"","encoding":"base64"}`, `{"content":"\ud800x"}`, `{ "content" : "a" , "append" : true }`,
		`{"x":{"content":"a"},"content":"b"}`, `{"content":"a","content":"b"}`, `{"c\u006fntent":"b"}`, `["content","a"]`, `{"content":null}`, `{"content":"a"}x`, "{\"content\":\"\xff\"}",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		var content strings.Builder
		in, err := readWrite(strings.NewReader(string(body)), &content)
		var want writeRequest
		if wantErr := decodeJSON(body, &want); (err == nil) != (wantErr == nil) {
			if len(body) > 1<<10 { // what is besides the content is bounded
				return
			}
			t.Fatalf("%q: %v, not %v", body, err, wantErr)
		}
		if err != nil {
			if !errors.As(err, new(badField)) {
				t.Errorf("%q: %v", body, err)
			}
			return
		}
		if (in.Content == nil) != (want.Content == nil) || want.Content != nil && content.String() != *want.Content || in.File != want.File || in.Encoding != want.Encoding || in.Append != want.Append {
			t.Errorf("%q: %q of %+v, want %+v", body, content.String(), in, want)
		}
	})
}

// What a shell says it exports is read, or refused, and what was quoted comes back.
func FuzzExports(f *testing.F) {
	for _, s := range []string{
		"export A='b'\n", "declare -x A=\"b\\\"\\$c\"\nexport B\n", `export A='it'"'"'s'` + "\n", "declare -x A=$'a\\nb\\x41\\101\\u00e4'\n", "declare -rx A=\"\n\"\n", "export A='", "junk",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		vars, err := parseExports(b)
		if err == nil {
			for k := range vars {
				if !variable.MatchString(k) {
					t.Errorf("%q: the name %q", b, k)
				}
			}
		}
		r := &stateReader{memory: newMemory()}
		r.Write(b)
		r.end()
		if value := strings.ReplaceAll(string(b), "\x00", ""); utf8.Valid(b) {
			vars, err := parseExports([]byte("export A='" + strings.ReplaceAll(value, "'", `'\''`) + "'" + "\nexport B='2'\n"))
			if err != nil || vars["A"] != value || vars["B"] != "2" {
				t.Errorf("%q: %v %v", value, vars, err)
			}
		}
	})
}

// Every pattern is one or is refused, and matches what it says.
func FuzzGlob(f *testing.F) {
	for _, s := range []string{"*.py", "**/a/*", "[!a-z]?", "[]x]", "a**b", "[-a]", "[!-a]", "[^a]", "\xff*", "[z-a]", "[[:alpha:]]"} {
		f.Add(s, "a/b.py")
	}
	f.Fuzz(func(t *testing.T, pattern, name string) {
		re, err := compileGlob("glob", pattern)
		if err != nil {
			return
		}
		if pattern == name && !re.MatchString(name) && !strings.ContainsAny(pattern, "*?[") && !strings.HasPrefix(pattern, "./") && utf8.ValidString(name) {
			t.Errorf("%q does not match itself", pattern)
		}
		if re.MatchString(name) && !re.MatchString("dir/"+name) {
			t.Errorf("%q matches %q, but not below a directory", pattern, name)
		}
	})
}

// Requests of every kind are decoded or refused in words.
func FuzzRequests(f *testing.F) {
	for _, s := range []string{
		`{"command":"x","hard_timeout":1e308}`, `{"command":"x","env":{"A":null}}`, `{"path":"/","pattern":"x","max_file_size":"1M"}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, v := range []any{&shellExec{}, &shellCreate{}, &bashExec{}, &grepRequest{}} {
			if err := decodeJSON(body, v); err != nil {
				if !errors.As(err, new(badField)) {
					t.Errorf("%q: %v", body, err)
				}
				continue
			}
			switch in := v.(type) {
			case *shellExec:
				if d, err := limit("", in.HardTimeout); err == nil && d < 0 {
					t.Errorf("%q: a limit of %s", body, d)
				}
			case *bashExec:
				environment(in.Env)
			case *grepRequest:
				if g, err := newGrep(*in); err == nil && (g.most > maxMatches || g.maxSize > maxGrepFile || g.maxSize < 0) {
					t.Errorf("%q: %+v", body, g)
				}
			}
			if _, err := json.Marshal(v); err != nil {
				t.Errorf("%q: %v", body, err)
			}
		}
	})
}

package aioserver

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/sand-boxer/sandboxer"
)

// The bounds of operations on a tree.
const (
	maxVisited  = 200_000         // entries that are looked at
	maxListed   = 20_000          // entries that are answered
	walkLimit   = 2 * time.Minute // then what was found by then is the answer
	maxPattern  = 4 << 10         // bytes
	maxMatches  = 10_000
	maxLine     = 2_000   // characters of a line that are answered
	grepAtOnce  = 4       // files
	maxGrepFile = 8 << 20 // bytes; larger ones are not searched
	defGrep     = 500     // default number of matches
	defGrepFile = 1 << 20 // default number of bytes of a file
	maxAnswer   = 8 << 20 // bytes of lines of matches
)

var errEnough = errors.New("enough was found")

// walk calls visit with everything below root, each directory before its content, in the order of names,
// and with the path relative to root. It follows no links, except that root may be one. It reports whether
// it was cut off. visit may return fs.SkipDir, and errEnough.
func (c *call) walk(root string, visit func(fi sandboxer.FileInfo, rel string) error) (cut bool, err error) {
	ctx, cancel := context.WithTimeout(c.ctx(), walkLimit)
	defer cancel()
	visited := 0
	var into func(dir, rel string) error
	into = func(dir, rel string) error {
		// A directory is read to its end before its subdirectories are: it takes a stream of the sandbox's.
		var dirs []string
		for fi, err := range c.s.opts.Sandboxes.ListFiles(ctx, c.sb.ID, dir, "") {
			if err != nil {
				if rel != "" && (sandboxer.KindOf(err) == sandboxer.NotFound || sandboxer.KindOf(err) == sandboxer.Denied || sandboxer.KindOf(err) == sandboxer.Invalid) {
					return nil // gone meanwhile, or not to be read
				}
				return err
			}
			if visited++; visited > maxVisited {
				return errEnough
			}
			name := path.Base(fi.Path)
			fi.Path = path.Join(dir, name)
			switch err := visit(fi, path.Join(rel, name)); {
			case err == fs.SkipDir:
			case err != nil:
				return err
			case fi.Mode.IsDir():
				if err := c.reserve(len(name)); err != nil {
					return err
				}
				dirs = append(dirs, name)
			}
		}
		for _, name := range dirs {
			if err := into(path.Join(dir, name), path.Join(rel, name)); err != nil {
				return err
			}
		}
		return nil
	}
	err = into(root, "")
	switch {
	case err == errEnough:
		return true, nil
	case err != nil && ctx.Err() != nil && c.ctx().Err() == nil:
		return true, nil
	}
	return false, err
}

// compileGlob translates a pattern with **, *, ? and [...] for the end of a relative path.
func compileGlob(field, pattern string) (*regexp.Regexp, error) {
	if len(pattern) > maxPattern {
		return nil, bad(field, "it is longer than %d bytes", maxPattern)
	}
	pattern = strings.TrimPrefix(pattern, "./")
	var b strings.Builder
	b.WriteString(`^(?:.*/)?(?s:`)
	for i := 0; i < len(pattern); {
		switch rest := pattern[i:]; {
		case strings.HasPrefix(rest, "**/") && (i == 0 || pattern[i-1] == '/'):
			b.WriteString(`(?:.*/)?`)
			i += 3
		case strings.HasPrefix(rest, "**"):
			b.WriteString(`.*`)
			i += 2
		case rest[0] == '*':
			b.WriteString(`[^/]*`)
			i++
		case rest[0] == '?':
			b.WriteString(`[^/]`)
			i++
		case rest[0] == '[' && strings.IndexByte(rest[min(2, len(rest)):], ']') >= 0:
			end := 2 + strings.IndexByte(rest[2:], ']')
			class := strings.NewReplacer(`\`, `\\`, `[`, `\[`, `]`, `\]`, `&`, `\&`, `~`, `\~`).Replace(rest[1:end])
			if not, ok := strings.CutPrefix(class, "!"); ok {
				if strings.HasPrefix(not, "-") {
					not = `\` + not
				}
				class = "^/" + not
			} else if strings.HasPrefix(class, "^") {
				class = `\` + class
			}
			b.WriteString("[" + class + "]")
			i += end + 1
		default:
			_, n := utf8.DecodeRuneInString(rest)
			b.WriteString(regexp.QuoteMeta(rest[:n]))
			i += n
		}
	}
	b.WriteString(`)$`)
	re, err := regexp.Compile(b.String())
	if err != nil {
		return nil, bad(field, "it is no pattern: %v", err)
	}
	return re, nil
}

type listed struct {
	Name         string  `json:"name"`
	Path         string  `json:"path"`
	IsDirectory  bool    `json:"is_directory"`
	Size         *int64  `json:"size"`
	ModifiedTime string  `json:"modified_time"`
	Permissions  *string `json:"permissions"`
	Extension    string  `json:"extension"`
}

func isoTime(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.999999Z07:00") }

// incomplete is the message of an answer that leaves out results.
const incomplete = "There is more than this: it is not all listed. Ask for a directory below, or for a narrower pattern."

func (c *call) fileList() error {
	var in struct {
		Path        string `json:"path"`
		Recursive   bool   `json:"recursive"`
		ShowHidden  *bool  `json:"show_hidden"`
		IncludeSize *bool  `json:"include_size"`
	}
	if err := c.decode(&in); err != nil {
		return err
	}
	root, err := c.on("list", "path", in.Path)
	if err != nil {
		return err
	}
	out := struct {
		Path           string   `json:"path"`
		Files          []listed `json:"files"`
		TotalCount     int      `json:"total_count"`
		DirectoryCount int      `json:"directory_count"`
		FileCount      int      `json:"file_count"`
		Truncated      bool     `json:"truncated"`
	}{Path: in.Path, Files: []listed{}}
	out.Truncated, err = c.walk(root, func(fi sandboxer.FileInfo, rel string) error {
		name := path.Base(fi.Path)
		if in.ShowHidden != nil && !*in.ShowHidden && strings.HasPrefix(name, ".") {
			return fs.SkipDir
		}
		if len(out.Files) == maxListed {
			return errEnough
		}
		if err := c.reserve(len(fi.Path) + 200); err != nil {
			return err
		}
		f := listed{Name: name, Path: fi.Path, IsDirectory: fi.Mode.IsDir(), ModifiedTime: isoTime(fi.ModTime), Extension: path.Ext(name)}
		if f.IsDirectory {
			out.DirectoryCount++
		} else {
			out.FileCount++
			if in.IncludeSize == nil || *in.IncludeSize {
				f.Size = &fi.Size
			}
		}
		out.Files = append(out.Files, f)
		if !in.Recursive {
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return err
	}
	slices.SortStableFunc(out.Files, func(a, b listed) int { return strings.Compare(a.Name, b.Name) })
	out.TotalCount = len(out.Files)
	return c.found(out.Truncated, out)
}

// found answers what was found, and says if that is not all.
func (c *call) found(cut bool, data any) error {
	if cut {
		return c.say(incomplete, data)
	}
	return c.answer(data)
}

// fileFind finds names by a pattern that fits the end of a path, at any depth.
func (c *call) fileFind() error {
	var in struct {
		Path string `json:"path"`
		Glob string `json:"glob"`
	}
	if err := c.decode(&in); err != nil {
		return err
	}
	if in.Glob == "" {
		return bad("glob", "it is missing")
	}
	re, err := compileGlob("glob", in.Glob)
	if err != nil {
		return err
	}
	root, err := c.on("find", "path", in.Path)
	if err != nil {
		return err
	}
	out := struct {
		Path      string   `json:"path"`
		Files     []string `json:"files"`
		Truncated bool     `json:"truncated"`
	}{Path: in.Path, Files: []string{}}
	out.Truncated, err = c.walk(root, func(fi sandboxer.FileInfo, rel string) error {
		if !re.MatchString(rel) {
			return nil
		}
		if len(out.Files) == maxListed {
			return errEnough
		}
		out.Files = append(out.Files, fi.Path)
		return c.reserve(len(fi.Path))
	})
	if err != nil {
		return err
	}
	slices.Sort(out.Files)
	return c.found(out.Truncated, out)
}

// count returns a number of results that may be left out.
func count(field string, n *int, def, most int) (int, error) {
	switch {
	case n == nil:
		return def, nil
	case *n < 0:
		return 0, bad(field, "want 0 or more")
	case *n == 0:
		return def, nil
	}
	return min(*n, most), nil
}

// parseSize reads a size such as 1M or 500K.
func parseSize(field, s string, def int64) (int64, error) {
	if s == "" {
		return def, nil
	}
	upper := strings.TrimSuffix(strings.ToUpper(s), "B")
	shift := 0
	for unit, bits := range map[string]int{"K": 10, "M": 20, "G": 30} {
		if rest, ok := strings.CutSuffix(upper, unit); ok {
			upper, shift = rest, bits
			break
		}
	}
	n, err := strconv.ParseInt(upper, 10, 64)
	if err != nil || n < 0 || n > 1<<30 {
		return 0, bad(field, "want a size such as 1M or 500K")
	}
	return n << shift, nil
}

type grepRequest struct {
	Path            string `json:"path"`
	Pattern         string `json:"pattern"`
	CaseInsensitive bool   `json:"case_insensitive"`
	FixedStrings    bool   `json:"fixed_strings"`
	MaxResults      *int   `json:"max_results"`
	MaxFileSize     string `json:"max_file_size"`
	Recursive       *bool  `json:"recursive"`
}

type grepMatch struct {
	File          string   `json:"file"`
	LineNumber    int      `json:"line_number"`
	LineContent   string   `json:"line_content"`
	ContextBefore []string `json:"context_before"`
	ContextAfter  []string `json:"context_after"`
}

type grepResult struct {
	Path          string      `json:"path"`
	Pattern       string      `json:"pattern"`
	Matches       []grepMatch `json:"matches"`
	MatchCount    int         `json:"match_count"`
	FilesSearched int         `json:"files_searched"`
	FilesMatched  int         `json:"files_matched"`
	Truncated     bool        `json:"truncated"`
}

// grep is one search in files.
type grep struct {
	re      *regexp.Regexp
	most    int
	maxSize int64
}

func newGrep(in grepRequest) (*grep, error) {
	if in.Pattern == "" {
		return nil, bad("pattern", "it is missing")
	}
	if len(in.Pattern) > maxPattern {
		return nil, bad("pattern", "it is longer than %d bytes", maxPattern)
	}
	pattern := in.Pattern
	if in.FixedStrings {
		pattern = regexp.QuoteMeta(pattern)
	}
	flags := "m"
	if in.CaseInsensitive {
		flags += "i"
	}
	g := &grep{}
	var err1, err2, err3 error
	if g.re, err1 = regexp.Compile("(?" + flags + ")" + pattern); err1 != nil {
		return nil, bad("pattern", "%v", err1)
	}
	g.most, err2 = count("max_results", in.MaxResults, defGrep, maxMatches)
	g.maxSize, err3 = parseSize("max_file_size", in.MaxFileSize, defGrepFile)
	g.maxSize = min(g.maxSize, maxGrepFile)
	return g, errors.Join(err2, err3)
}

func (c *call) fileGrep() error {
	var in grepRequest
	if err := c.decode(&in); err != nil {
		return err
	}
	g, err := newGrep(in)
	if err != nil {
		return err
	}
	root, err := c.on("grep", "path", in.Path)
	if err != nil {
		return err
	}
	out := &grepResult{Path: in.Path, Pattern: in.Pattern, Matches: []grepMatch{}}
	fi, err := c.s.opts.Sandboxes.StatFile(c.ctx(), c.sb.ID, root)
	if err != nil {
		return err
	}
	if fi.Mode.IsRegular() || fi.Mode.Type() == fs.ModeSymlink && !c.isDir(root) {
		// A single file is searched whatever its name.
		err = c.grepSome(g, []string{root}, true, out)
	} else {
		var batch []string
		size := int64(0)
		out.Truncated, err = c.walk(root, func(fi sandboxer.FileInfo, _ string) error {
			if in.Recursive != nil && !*in.Recursive && fi.Mode.IsDir() {
				return fs.SkipDir
			}
			if !fi.Mode.IsRegular() || fi.Size > g.maxSize {
				return nil
			}
			batch = append(batch, fi.Path)
			if size += fi.Size; len(batch) < 16*grepAtOnce && size < maxGrepFile {
				return nil
			}
			err := c.grepFiles(g, batch, out)
			batch, size = batch[:0], 0
			return err
		})
		if err == nil {
			err = c.grepFiles(g, batch, out)
		}
	}
	if err != nil && err != errEnough {
		return err
	}
	out.Truncated = out.Truncated || err == errEnough
	return c.found(out.Truncated, out)
}

// isDir reports whether a link leads to a directory.
func (c *call) isDir(name string) bool {
	for _, err := range c.s.opts.Sandboxes.ListFiles(c.ctx(), c.sb.ID, name, "") {
		return err == nil
	}
	return true
}

// grepFiles searches files and adds what it finds in their order. errEnough: no more is wanted.
func (c *call) grepFiles(g *grep, names []string, out *grepResult) error {
	for some := range slices.Chunk(names, grepAtOnce) {
		if err := c.grepSome(g, some, false, out); err != nil {
			return err
		}
	}
	return nil
}

// grepSome is grepFiles for a few, which are read at once. It skips files that cannot be
// read unless must is set.
func (c *call) grepSome(g *grep, some []string, must bool, out *grepResult) error {
	contents := make([]string, len(some))
	failed := make([]error, len(some))
	held := make([]int, len(some))
	var wg sync.WaitGroup
	for i, name := range some {
		wg.Go(func() { contents[i], held[i], failed[i] = c.grepRead(name, g.maxSize) })
	}
	wg.Wait()
	defer func() {
		for _, n := range held {
			c.s.memory.shrink(c.who, forRequests, n)
		}
	}()
	for i, name := range some {
		switch kind := sandboxer.KindOf(failed[i]); {
		case failed[i] == nil:
		case (kind == sandboxer.NotFound || kind == sandboxer.Denied || kind == sandboxer.Invalid) && !must:
			continue // gone meanwhile, or not to be read
		default:
			return failed[i]
		}
		if strings.IndexByte(contents[i][:min(len(contents[i]), 8<<10)], 0) >= 0 {
			continue // binary
		}
		out.FilesSearched++
		if err := c.grepText(g, name, contents[i], out); err != nil {
			return err
		}
	}
	return nil
}

// grepRead reads the searched part of a file, and returns how much memory it has reserved for that.
func (c *call) grepRead(name string, most int64) (text string, held int, err error) {
	f, err := c.s.opts.Sandboxes.ReadFile(c.ctx(), c.sb.ID, name)
	if err != nil {
		return "", 0, err
	}
	defer f.Close()
	own := &call{s: c.s, who: c.who} // of this file alone
	b, err := io.ReadAll(&reservingReader{own, io.LimitReader(f, most)})
	return string(b), own.reserved, err
}

// grepText adds the lines of one text that match.
func (c *call) grepText(g *grep, name, text string, out *grepResult) error {
	matched, n := false, 0
	for line := range strings.Lines(text) {
		n++
		if line = strings.TrimRight(line, "\r\n"); !g.re.MatchString(line) {
			continue
		}
		if !matched {
			matched = true
			out.FilesMatched++
		}
		if len(out.Matches) == g.most {
			return errEnough
		}
		m := grepMatch{File: name, LineNumber: n, LineContent: shorten(strings.ToValidUTF8(line, "\uFFFD"), maxLine), ContextBefore: []string{}, ContextAfter: []string{}}
		size := len(m.File) + encodedSize(m.LineContent) + 100
		if c.reserved+size > maxAnswer {
			return errEnough
		}
		if err := c.reserve(size); err != nil {
			return err
		}
		out.Matches, out.MatchCount = append(out.Matches, m), out.MatchCount+1
	}
	return nil
}

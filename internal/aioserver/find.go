package aioserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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

// The bounds of what looks at a tree.
const (
	maxVisited  = 200_000         // entries that are looked at
	maxListed   = 20_000          // entries that are answered
	walkLimit   = 2 * time.Minute // then what was found by then is the answer
	maxPatterns = 64
	grepAtOnce  = 4       // files
	maxGrepFile = 8 << 20 // bytes; larger ones are not searched
	defGrep     = 500     // matches where nobody says how many
	defGrepFile = 1 << 20 // bytes of a file where nobody says it
	defGlob     = 5_000   // paths where nobody says how many
	maxContext  = 50      // lines before and after a match
	maxFound    = 100_000 // places in one file where a pattern that spans lines fits
	maxAnswer   = 8 << 20 // bytes of lines of matches
)

var errEnough = errors.New("enough was found")

// walk calls visit with what lies below root, each directory before its content, in the order of names,
// and with the path relative to root. Links are not followed, but that root is one. It reports whether
// it was cut off. visit may return fs.SkipDir, and errEnough.
func (c *call) walk(root string, visit func(fi sandboxer.FileInfo, rel string, depth int) error) (cut bool, err error) {
	ctx, cancel := context.WithTimeout(c.ctx(), walkLimit)
	defer cancel()
	visited := 0
	var into func(dir, rel string, depth int) error
	into = func(dir, rel string, depth int) error {
		// A directory is read to its end before those in it are: it takes a stream of the sandbox's.
		var dirs []string
		for fi, err := range c.s.opts.Sandboxes.ListFiles(ctx, c.sb.ID, dir, "") {
			if err != nil {
				if depth > 0 && (sandboxer.KindOf(err) == sandboxer.NotFound || sandboxer.KindOf(err) == sandboxer.Denied || sandboxer.KindOf(err) == sandboxer.Invalid) {
					return nil // gone meanwhile, or not to be read
				}
				return err
			}
			if visited++; visited > maxVisited {
				return errEnough
			}
			name := path.Base(fi.Path)
			fi.Path = path.Join(dir, name)
			switch err := visit(fi, path.Join(rel, name), depth+1); {
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
			if err := into(path.Join(dir, name), path.Join(rel, name), depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	err = into(root, "", 0)
	switch {
	case err == errEnough:
		return true, nil
	case err != nil && ctx.Err() != nil && c.ctx().Err() == nil:
		return true, nil
	}
	return false, err
}

// globs are patterns of names or of paths.
type globs []*regexp.Regexp

// compileGlob translates a pattern with **, *, ? and [...], for the whole of a relative path; or, anywhere,
// for the end of one.
func compileGlob(field, pattern string, anywhere bool) (*regexp.Regexp, error) {
	if len(pattern) > maxPattern {
		return nil, bad(field, "it is longer than %d bytes", maxPattern)
	}
	pattern = strings.TrimPrefix(pattern, "./")
	var b strings.Builder
	b.WriteString(`^`)
	if anywhere {
		b.WriteString(`(?:.*/)?`)
	}
	b.WriteString(`(?s:`)
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

func compileGlobs(field string, patterns []string) (globs, error) {
	if len(patterns) > maxPatterns {
		return nil, bad(field, "want at most %d patterns", maxPatterns)
	}
	var g globs
	for _, p := range patterns {
		re, err := compileGlob(field, strings.TrimSuffix(p, "/"), true)
		if err != nil {
			return nil, err
		}
		g = append(g, re)
	}
	return g, nil
}

func (g globs) match(rel string) bool {
	return slices.ContainsFunc(g, func(re *regexp.Regexp) bool { return re.MatchString(rel) })
}

type listed struct {
	Name         string  `json:"name"`
	Path         string  `json:"path"`
	IsDirectory  bool    `json:"is_directory"`
	Size         *int64  `json:"size"`
	ModifiedTime *string `json:"modified_time"`
	Permissions  *string `json:"permissions"`
	Extension    *string `json:"extension"`
}

func isoTime(t time.Time) *string {
	s := t.UTC().Format("2006-01-02T15:04:05.999999Z07:00")
	return &s
}

// incomplete is what an answer says that does not hold all there is.
const incomplete = "There is more than this: it is not all listed. Ask for a directory below, or for a narrower pattern."

func (c *call) fileList() error {
	var in struct {
		Path               string   `json:"path"`
		Recursive          bool     `json:"recursive"`
		ShowHidden         *bool    `json:"show_hidden"`
		FileTypes          []string `json:"file_types"`
		MaxDepth           *int     `json:"max_depth"`
		IncludeSize        *bool    `json:"include_size"`
		IncludePermissions bool     `json:"include_permissions"`
		SortBy             string   `json:"sort_by"`
		SortDesc           bool     `json:"sort_desc"`
	}
	if err := c.decode(&in); err != nil {
		return err
	}
	if len(in.FileTypes) > maxPatterns {
		return bad("file_types", "want at most %d", maxPatterns)
	}
	less, err := order[listed](cmp.Or(in.SortBy, "name"), map[string]func(a, b *listed) int{
		"name":     func(a, b *listed) int { return strings.Compare(a.Name, b.Name) },
		"path":     func(a, b *listed) int { return strings.Compare(a.Path, b.Path) },
		"size":     func(a, b *listed) int { return int(min(max(*a.Size-*b.Size, -1), 1)) },
		"modified": func(a, b *listed) int { return strings.Compare(*a.ModifiedTime, *b.ModifiedTime) },
		"type": func(a, b *listed) int {
			if a.IsDirectory != b.IsDirectory {
				return map[bool]int{true: -1, false: 1}[a.IsDirectory]
			}
			if a.IsDirectory {
				return 0
			}
			return strings.Compare(*a.Extension, *b.Extension)
		},
	})
	if err != nil {
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
	out.Truncated, err = c.walk(root, func(fi sandboxer.FileInfo, rel string, depth int) error {
		name := path.Base(fi.Path)
		if in.ShowHidden != nil && !*in.ShowHidden && strings.HasPrefix(name, ".") {
			return fs.SkipDir
		}
		below := error(nil)
		if !in.Recursive || in.MaxDepth != nil && depth >= *in.MaxDepth {
			below = fs.SkipDir
		}
		ext := path.Ext(name)
		if len(in.FileTypes) > 0 && (fi.Mode.IsDir() || !slices.ContainsFunc(in.FileTypes, func(t string) bool { return strings.TrimPrefix(t, ".") == strings.TrimPrefix(ext, ".") && ext != "" })) {
			return below
		}
		if len(out.Files) == maxListed {
			return errEnough
		}
		if err := c.reserve(len(fi.Path) + 200); err != nil {
			return err
		}
		perm := fmt.Sprintf("%o", fi.Mode.Perm())
		out.Files = append(out.Files, listed{Name: name, Path: fi.Path, IsDirectory: fi.Mode.IsDir(), Size: &fi.Size, ModifiedTime: isoTime(fi.ModTime), Permissions: &perm, Extension: &ext})
		return below
	})
	if err != nil {
		return err
	}
	sorted(out.Files, less, in.SortDesc)
	for i := range out.Files {
		f := &out.Files[i]
		if f.IsDirectory {
			out.DirectoryCount++
		} else {
			out.FileCount++
		}
		if in.IncludeSize != nil && !*in.IncludeSize || f.IsDirectory {
			f.Size = nil
		}
		if !in.IncludePermissions {
			f.Permissions = nil
		}
	}
	out.TotalCount = len(out.Files)
	return c.found(out.Truncated, out)
}

// found answers what was found, and says if it is not all.
func (c *call) found(cut bool, data any) error {
	if cut {
		return c.say(incomplete, data)
	}
	return c.answer(data)
}

// order returns how to compare by a key; nil for the order in which things were found.
func order[T any](by string, known map[string]func(a, b *T) int) (func(a, b *T) int, error) {
	if by == "" {
		return nil, nil
	}
	f, ok := known[by]
	if !ok {
		names := []string{}
		for k := range known {
			names = append(names, k)
		}
		slices.Sort(names)
		return nil, bad("sort_by", "want %s", strings.Join(names, ", "))
	}
	return f, nil
}

func sorted[T any](items []T, compare func(a, b *T) int, desc bool) {
	if compare != nil {
		slices.SortStableFunc(items, func(a, b T) int { return compare(&a, &b) })
	}
	if desc {
		slices.Reverse(items)
	}
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
	re, err := compileGlob("glob", in.Glob, true)
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
	out.Truncated, err = c.walk(root, func(fi sandboxer.FileInfo, rel string, depth int) error {
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

type globbed struct {
	Path         string  `json:"path"`
	Name         string  `json:"name"`
	IsDirectory  bool    `json:"is_directory"`
	Size         *int64  `json:"size"`
	ModifiedTime *string `json:"modified_time"`
}

// fileGlob finds paths by a pattern that fits the whole of them, from a directory on.
func (c *call) fileGlob() error {
	var in struct {
		Path            string   `json:"path"`
		Pattern         string   `json:"pattern"`
		Exclude         []string `json:"exclude"`
		IncludeHidden   bool     `json:"include_hidden"`
		FilesOnly       *bool    `json:"files_only"`
		IncludeMetadata *bool    `json:"include_metadata"`
		MaxResults      *int     `json:"max_results"`
		SortBy          string   `json:"sort_by"`
		SortDesc        bool     `json:"sort_desc"`
	}
	if err := c.decode(&in); err != nil {
		return err
	}
	if in.Pattern == "" {
		return bad("pattern", "it is missing")
	}
	re, err1 := compileGlob("pattern", in.Pattern, false)
	exclude, err2 := compileGlobs("exclude", in.Exclude)
	most, err3 := count("max_results", in.MaxResults, defGlob, maxListed)
	less, err4 := order[globbed](in.SortBy, map[string]func(a, b *globbed) int{
		"path":     func(a, b *globbed) int { return strings.Compare(a.Path, b.Path) },
		"name":     func(a, b *globbed) int { return strings.Compare(a.Name, b.Name) },
		"size":     func(a, b *globbed) int { return int(min(max(*a.Size-*b.Size, -1), 1)) },
		"modified": func(a, b *globbed) int { return strings.Compare(*a.ModifiedTime, *b.ModifiedTime) },
	})
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	root, err := c.on("glob", "path", in.Path)
	if err != nil {
		return err
	}
	filesOnly := in.FilesOnly == nil || *in.FilesOnly
	out := struct {
		Path       string    `json:"path"`
		Pattern    string    `json:"pattern"`
		Files      []globbed `json:"files"`
		TotalCount int       `json:"total_count"`
		Truncated  bool      `json:"truncated"`
	}{Path: in.Path, Pattern: in.Pattern, Files: []globbed{}}
	var all []globbed
	cut, err := c.walk(root, func(fi sandboxer.FileInfo, rel string, depth int) error {
		name := path.Base(fi.Path)
		if !in.IncludeHidden && strings.HasPrefix(name, ".") || exclude.match(rel) {
			return fs.SkipDir
		}
		if !re.MatchString(rel) || filesOnly && fi.Mode.IsDir() {
			return nil
		}
		if len(all) == maxListed {
			return errEnough
		}
		all = append(all, globbed{Path: fi.Path, Name: name, IsDirectory: fi.Mode.IsDir(), Size: &fi.Size, ModifiedTime: isoTime(fi.ModTime)})
		return c.reserve(len(fi.Path) + 150)
	})
	if err != nil {
		return err
	}
	if less == nil {
		less = func(a, b *globbed) int { return strings.Compare(a.Path, b.Path) }
	}
	sorted(all, less, in.SortDesc)
	out.TotalCount, out.Truncated = len(all), cut || len(all) > most
	out.Files = append(out.Files, all[:min(len(all), most)]...)
	if in.IncludeMetadata != nil && !*in.IncludeMetadata {
		for i := range out.Files {
			out.Files[i].Size, out.Files[i].ModifiedTime = nil, nil
		}
	}
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

// fileTypes are names of kinds of files, and the ends of theirs.
var fileTypes = map[string][]string{
	"c": {"c", "h"}, "cpp": {"cc", "cpp", "cxx", "c++", "h", "hh", "hpp", "hxx"}, "cs": {"cs"}, "css": {"css", "scss"}, "csv": {"csv"},
	"go": {"go"}, "html": {"htm", "html", "ejs"}, "java": {"java", "jsp"}, "js": {"js", "jsx", "mjs", "cjs", "vue"}, "json": {"json"}, "kotlin": {"kt", "kts"},
	"lua": {"lua"}, "md": {"md", "markdown", "mdown", "mdx"}, "markdown": {"md", "markdown", "mdown", "mdx"}, "php": {"php"}, "py": {"py", "pyi"}, "python": {"py", "pyi"},
	"ruby": {"rb", "gemspec"}, "rust": {"rs"}, "sh": {"sh", "bash", "zsh", "ksh"}, "sql": {"sql"}, "swift": {"swift"}, "toml": {"toml"},
	"ts": {"ts", "tsx", "cts", "mts"}, "txt": {"txt"}, "xml": {"xml", "xsl", "xsd"}, "yaml": {"yaml", "yml"},
}

type grepRequest struct {
	Path            string   `json:"path"`
	Pattern         string   `json:"pattern"`
	Include         []string `json:"include"`
	Exclude         []string `json:"exclude"`
	CaseInsensitive bool     `json:"case_insensitive"`
	FixedStrings    bool     `json:"fixed_strings"`
	ContextBefore   int      `json:"context_before"`
	ContextAfter    int      `json:"context_after"`
	MaxResults      *int     `json:"max_results"`
	MaxFileSize     string   `json:"max_file_size"`
	Multiline       bool     `json:"multiline"`
	Offset          int      `json:"offset"`
	Type            string   `json:"type"`
	Recursive       *bool    `json:"recursive"`
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
	in      grepRequest
	re      *regexp.Regexp
	include globs
	exclude globs
	exts    []string
	most    int
	maxSize int64
}

func newGrep(in grepRequest) (*grep, error) {
	if in.Pattern == "" {
		return nil, bad("pattern", "it is missing")
	}
	if in.ContextBefore < 0 || in.ContextAfter < 0 || in.ContextBefore > maxContext || in.ContextAfter > maxContext {
		return nil, bad("context_before", "want 0 to %d lines of context", maxContext)
	}
	if in.Offset < 0 {
		return nil, bad("offset", "want 0 or more")
	}
	pattern := in.Pattern
	if in.FixedStrings {
		pattern = regexp.QuoteMeta(pattern)
	}
	flags := "m"
	if in.CaseInsensitive {
		flags += "i"
	}
	if in.Multiline {
		flags += "s"
	}
	g := &grep{in: in}
	var err1, err2, err3, err4, err5 error
	if len(in.Pattern) > maxPattern {
		return nil, bad("pattern", "it is longer than %d bytes", maxPattern)
	}
	if g.re, err1 = regexp.Compile("(?" + flags + ")" + pattern); err1 != nil {
		return nil, bad("pattern", "%v", err1)
	}
	g.include, err2 = compileGlobs("include", in.Include)
	g.exclude, err3 = compileGlobs("exclude", in.Exclude)
	g.most, err4 = count("max_results", in.MaxResults, defGrep, maxMatches)
	g.maxSize, err5 = parseSize("max_file_size", in.MaxFileSize, defGrepFile)
	g.maxSize = min(g.maxSize, maxGrepFile)
	if in.Type != "" {
		if g.exts = fileTypes[in.Type]; g.exts == nil {
			return nil, bad("type", "it is no kind of files that is known; use include, such as [\"*.%s\"]", firstRunes(in.Type, min(10, len([]rune(in.Type)))))
		}
	}
	return g, errors.Join(err2, err3, err4, err5)
}

func (g *grep) wants(fi sandboxer.FileInfo, rel string) bool {
	return fi.Mode.IsRegular() && fi.Size <= g.maxSize && (len(g.include) == 0 || g.include.match(rel)) &&
		(g.exts == nil || slices.Contains(g.exts, strings.TrimPrefix(path.Ext(rel), ".")))
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
		// One file is searched whatever it is called.
		err = c.grepSome(g, []string{root}, true, out)
	} else {
		var batch []string
		size := int64(0)
		out.Truncated, err = c.walk(root, func(fi sandboxer.FileInfo, rel string, depth int) error {
			if g.exclude.match(rel) || in.Recursive != nil && !*in.Recursive && fi.Mode.IsDir() {
				return fs.SkipDir
			}
			if !g.wants(fi, rel) {
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

// grepSome is grepFiles for a few, which are read at once. Unless they must be there, those that cannot be
// read are passed over.
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

// grepRead reads what is looked at of a file, and returns how much memory it has reserved for that.
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

// grepText adds the matches in one text: each line once in which one begins.
func (c *call) grepText(g *grep, name, text string, out *grepResult) error {
	starts := []int{0}
	for i := 0; i < len(text); i++ {
		if text[i] == '\n' && i+1 < len(text) {
			starts = append(starts, i+1)
		}
	}
	line := func(n int) string {
		end := len(text)
		if n+1 < len(starts) {
			end = starts[n+1]
		}
		return shorten(strings.ToValidUTF8(strings.TrimRight(text[starts[n]:end], "\r\n"), "\uFFFD"), maxLine)
	}
	lines := func(from, to int) []string {
		out := []string{}
		for n := max(from, 0); n < min(to, len(starts)); n++ {
			out = append(out, line(n))
		}
		return out
	}
	matched := false
	add := func(n int) error {
		if !matched {
			matched = true
			out.FilesMatched++
		}
		if out.MatchCount++; out.MatchCount <= g.in.Offset {
			return nil
		}
		if len(out.Matches) == g.most {
			out.MatchCount--
			return errEnough
		}
		m := grepMatch{File: name, LineNumber: n + 1, LineContent: line(n), ContextBefore: lines(n-g.in.ContextBefore, n), ContextAfter: lines(n+1, n+1+g.in.ContextAfter)}
		size := len(m.File) + encodedSize(m.LineContent) + 100
		for _, l := range slices.Concat(m.ContextBefore, m.ContextAfter) {
			size += encodedSize(l)
		}
		if c.reserved+size > maxAnswer {
			return errEnough
		}
		if err := c.reserve(size); err != nil {
			return err
		}
		out.Matches = append(out.Matches, m)
		return nil
	}
	if g.in.Multiline {
		last := -1
		for _, loc := range g.re.FindAllStringIndex(text, maxFound) {
			n, found := slices.BinarySearch(starts, loc[0])
			if !found {
				n--
			}
			if n != last && text != "" {
				if err := add(n); err != nil {
					return err
				}
				last = n
			}
		}
		return nil
	}
	for n := range starts {
		end := len(text)
		if n+1 < len(starts) {
			end = starts[n+1]
		}
		if text != "" && g.re.MatchString(strings.TrimRight(text[starts[n]:end], "\r\n")) {
			if err := add(n); err != nil {
				return err
			}
		}
	}
	return nil
}

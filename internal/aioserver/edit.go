package aioserver

import (
	"fmt"
	"io/fs"
	"net/http"
	"path"
	"slices"
	"strings"

	"github.com/sand-boxer/sandboxer"
)

// The bounds of undo_edit.
const (
	maxEdits     = 10                   // of one file
	maxEditFiles = 64                   // of one sandbox
	maxEditBytes = maxMemorySandbox / 8 // of one sandbox
)

// maxShown is how long the old content and the new one are at most, in JSON, where an edit answers them.
const maxShown = 8 << 20

// edit is what a file held before it was changed.
type edit struct {
	existed bool
	content string
}

type editRequest struct {
	Command     string  `json:"command"`
	Path        string  `json:"path"`
	FileText    *string `json:"file_text"`
	OldStr      *string `json:"old_str"`
	NewStr      *string `json:"new_str"`
	InsertLine  *int    `json:"insert_line"`
	ViewRange   []int   `json:"view_range"`
	ReplaceMode string  `json:"replace_mode"`

	// Of documents that are no text.
	PageRange  []int   `json:"page_range"`
	SheetName  *string `json:"sheet_name"`
	RowRange   []int   `json:"row_range"`
	SlideRange []int   `json:"slide_range"`

	EnableMetadata bool `json:"enable_metadata"` // there is none of texts
}

type editResult struct {
	Output     string  `json:"output"`
	Error      *string `json:"error"`
	Path       string  `json:"path"`
	PrevExist  bool    `json:"prev_exist"`
	OldContent *string `json:"old_content"`
	NewContent *string `json:"new_content"`
	Metadata   any     `json:"metadata"`
}

func (c *call) fileEdit() error {
	var in editRequest
	if err := c.decode(&in); err != nil {
		return err
	}
	if in.PageRange != nil || in.SheetName != nil || in.RowRange != nil || in.SlideRange != nil {
		return sandboxer.E(sandboxer.Unsupported, nil, "documents that are no text are not read here: page_range, sheet_name, row_range and slide_range").
			WithHint("convert the document in the sandbox by /v1/bash/exec")
	}
	var do func(editRequest, string) (editResult, error)
	switch in.Command {
	case "view":
		do = c.editView
	case "create":
		do = c.editCreate
	case "str_replace":
		do = c.editReplace
	case "insert":
		do = c.editInsert
	case "undo_edit":
		do = c.editUndo
	default:
		return bad("command", "want view, create, str_replace, insert or undo_edit")
	}
	name, err := c.on("str_replace_editor", "path", in.Path)
	if err != nil {
		return err
	}
	out, err := do(in, name)
	if err != nil {
		return err
	}
	out.Path = in.Path
	return c.answer(out)
}

// numbered shows lines with their numbers, as cat -n does.
func numbered(head string, lines []string, first int) string {
	var b strings.Builder
	b.WriteString(head)
	for i, l := range lines {
		fmt.Fprintf(&b, "%6d\t%s\n", first+i, l)
	}
	return b.String()
}

func linesOf(s string) []string {
	return strings.Split(strings.TrimSuffix(s, "\n"), "\n")
}

func (c *call) editView(in editRequest, name string) (out editResult, err error) {
	out.PrevExist = true
	fi, err := c.s.opts.Sandboxes.StatFile(c.ctx(), c.sb.ID, name)
	if err != nil {
		return out, err
	}
	if fi.Mode.IsDir() || fi.Mode.Type() == fs.ModeSymlink && c.isDir(name) {
		if in.ViewRange != nil {
			return out, bad("view_range", "%s is a directory", in.Path)
		}
		var b strings.Builder
		fmt.Fprintf(&b, "Here's the files and directories up to 2 levels deep in %s, excluding hidden items:\n%s\n", in.Path, name)
		n := 0
		cut, err := c.walk(name, func(fi sandboxer.FileInfo, rel string, depth int) error {
			if strings.HasPrefix(path.Base(rel), ".") {
				return fs.SkipDir
			}
			if n++; n > maxListed {
				return errEnough
			}
			b.WriteString(fi.Path)
			if fi.Mode.IsDir() {
				b.WriteString("/")
			}
			b.WriteString("\n")
			if err := c.reserve(len(fi.Path) + 2); err != nil {
				return err
			}
			if depth == 2 {
				return fs.SkipDir
			}
			return nil
		})
		if cut {
			b.WriteString(incomplete + "\n")
		}
		out.Output = b.String()
		return out, err
	}
	content, err := c.readText(name)
	if err != nil {
		return out, err
	}
	lines := linesOf(content)
	first, last := 1, len(lines)
	if in.ViewRange != nil {
		if len(in.ViewRange) != 2 {
			return out, bad("view_range", "want the first line and the last")
		}
		first = in.ViewRange[0]
		if in.ViewRange[1] != -1 {
			last = min(in.ViewRange[1], last)
		}
		if first < 1 || first > len(lines) || in.ViewRange[1] != -1 && in.ViewRange[1] < first {
			return out, bad("view_range", "want lines from 1 to %d, the first before the last; the last may be -1", len(lines))
		}
	}
	if err := c.reserve(len(content) + 8*len(lines)); err != nil {
		return out, err
	}
	out.Output = numbered(fmt.Sprintf("Here's the result of running `cat -n` on %s:\n", in.Path), lines[first-1:last], first)
	c.giveBack(len(content)) // which nobody needs any more
	if encodedSize(out.Output) > maxEncoded {
		return out, tooLong(name)
	}
	return out, c.foresee(out.Output, 1)
}

// change writes the new content of a file, keeps the old one for undo_edit, and shows what is around the
// lines that have changed.
func (c *call) change(in editRequest, name, old, changed string, from, to int) (out editResult, err error) {
	if len(changed) > maxText {
		return out, tooLong(name)
	}
	if err := c.reserve(len(changed)); err != nil {
		return out, err
	}
	if encodedSize(old)+encodedSize(changed) <= maxShown {
		out.OldContent, out.NewContent = &old, &changed
		if err := c.foresee(old, 1); err != nil {
			return out, err
		}
		if err := c.foresee(changed, 1); err != nil {
			return out, err
		}
	}
	if err := c.writeText(name, changed); err != nil {
		return out, err
	}
	c.remember(name, edit{true, old})
	lines := linesOf(changed)
	first, last := max(from-4, 1), min(to+4, len(lines))
	out.Output = fmt.Sprintf("The file %s has been edited. Here's the result of running `cat -n` on a snippet of it:\n", in.Path) + numbered("", lines[min(first, last)-1:last], min(first, last)) +
		"Review the changes and make sure they are as expected. Edit the file again if necessary."
	out.PrevExist = true
	return out, nil
}

// remember keeps what a file held, and lets go of what does not fit beside it.
func (c *call) remember(name string, e edit) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	st, err := c.s.state(c)
	if err != nil {
		return
	}
	if len(e.content) > maxEditBytes/2 {
		c.s.forgetEdits(st, name)
		return
	}
	for other := range st.edits {
		if st.editBytes+len(e.content) <= maxEditBytes && (len(st.edits) < maxEditFiles || st.edits[name] != nil) {
			break
		}
		if other != name {
			c.s.forgetEdits(st, other)
		}
	}
	if st.editBytes+len(e.content) > maxEditBytes {
		c.s.forgetEdits(st, name)
	}
	for !c.s.memory.grow(st.who, forEdits, len(e.content)) {
		if !c.s.forgetOldest(st) {
			c.s.forgetEdits(st, name)
			return
		}
	}
	st.editBytes += len(e.content)
	st.edits[name] = append(st.edits[name], e)
	if es := st.edits[name]; len(es) > maxEdits {
		c.s.shrinkEdits(st, len(es[0].content))
		st.edits[name] = slices.Delete(es, 0, 1)
	}
}

func (s *Server) shrinkEdits(st *sandboxState, n int) {
	s.memory.shrink(st.who, forEdits, n)
	st.editBytes -= n
}

// forgetOldest forgets the edits of the sandbox of st's tenant that was used longest ago, and reports whether
// there is one besides st.
func (s *Server) forgetOldest(st *sandboxState) bool {
	var oldest *sandboxState
	for _, o := range s.known {
		if o != st && o.who.tenant == st.who.tenant && o.editBytes > 0 && (oldest == nil || o.used.Before(oldest.used)) {
			oldest = o
		}
	}
	if oldest == nil {
		return false
	}
	for name := range oldest.edits {
		s.forgetEdits(oldest, name)
	}
	return true
}

func (s *Server) forgetEdits(st *sandboxState, name string) {
	for _, e := range st.edits[name] {
		s.shrinkEdits(st, len(e.content))
	}
	delete(st.edits, name)
}

func (c *call) editCreate(in editRequest, name string) (out editResult, err error) {
	if in.FileText == nil {
		return out, bad("file_text", "create needs it")
	}
	if _, exists, err := c.mode(name); err != nil {
		return out, err
	} else if exists {
		return out, fileFailure(http.StatusConflict, "already_exists", sandboxer.Conflict, nil, "%s exists already: create makes new files only", name)
	}
	if err := c.foresee(*in.FileText, 1); err != nil {
		return out, err
	}
	if err := c.writeText(name, *in.FileText); err != nil {
		return out, err
	}
	c.remember(name, edit{})
	out.Output = fmt.Sprintf("File created successfully at: %s", in.Path)
	out.NewContent = in.FileText
	return out, nil
}

func (c *call) editReplace(in editRequest, name string) (out editResult, err error) {
	if in.OldStr == nil || *in.OldStr == "" {
		return out, bad("old_str", "str_replace needs it")
	}
	with := ""
	if in.NewStr != nil {
		with = *in.NewStr
	}
	if with == *in.OldStr {
		return out, bad("new_str", "it is the same as old_str")
	}
	content, err := c.readText(name)
	if err != nil {
		return out, err
	}
	n := strings.Count(content, *in.OldStr)
	at := strings.Index(content, *in.OldStr)
	var changed string
	switch {
	case n == 0:
		return out, sandboxer.E(sandboxer.Invalid, nil, "no replacement was performed: old_str does not appear in %s", name)
	case in.ReplaceMode == "ALL":
		if changed, err = c.replaced(content, *in.OldStr, with, n); err != nil {
			return out, err
		}
		c.giveBack(len(changed)) // change reserves it
	case in.ReplaceMode == "LAST":
		at = strings.LastIndex(content, *in.OldStr)
		fallthrough
	case in.ReplaceMode == "FIRST":
		changed = content[:at] + with + content[at+len(*in.OldStr):]
	case in.ReplaceMode != "":
		return out, bad("replace_mode", "want ALL, FIRST or LAST")
	case n > 1:
		return out, sandboxer.E(sandboxer.Invalid, nil, "no replacement was performed: old_str appears %d times in %s", n, name).
			WithHint("make it unique, or say replace_mode: ALL, FIRST or LAST")
	default:
		changed = content[:at] + with + content[at+len(*in.OldStr):]
	}
	line := 1 + strings.Count(content[:at], "\n")
	return c.change(in, name, content, changed, line, line+strings.Count(with, "\n"))
}

func (c *call) editInsert(in editRequest, name string) (out editResult, err error) {
	if in.InsertLine == nil {
		return out, bad("insert_line", "insert needs it")
	}
	if in.NewStr == nil {
		return out, bad("new_str", "insert needs it")
	}
	content, err := c.readText(name)
	if err != nil {
		return out, err
	}
	lines := strings.SplitAfter(content, "\n")
	if lines[len(lines)-1] == "" {
		lines = lines[:len(lines)-1]
	}
	n := *in.InsertLine
	if n < 0 || n > len(lines) {
		return out, bad("insert_line", "want 0 to %d", len(lines))
	}
	before, text := strings.Join(lines[:n], ""), *in.NewStr
	if before != "" && !strings.HasSuffix(before, "\n") {
		before += "\n"
	}
	if !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	return c.change(in, name, content, before+text+strings.Join(lines[n:], ""), n+1, n+strings.Count(text, "\n"))
}

func (c *call) editUndo(in editRequest, name string) (out editResult, err error) {
	last, ok, err := c.takeEdit(name)
	if err != nil {
		return out, err
	}
	if !ok {
		return out, sandboxer.E(sandboxer.Invalid, nil, "nothing is known that %s could go back to", name).
			WithHint("only changes by this editor are kept, and not for ever")
	}
	if last.existed {
		err = c.writeText(name, last.content)
		out.NewContent = &last.content
	} else {
		err = c.s.opts.Sandboxes.RemoveFile(c.ctx(), c.sb.ID, name)
	}
	if err != nil {
		c.remember(name, last)
		return editResult{}, err
	}
	out.PrevExist = true
	out.Output = fmt.Sprintf("Last edit to %s undone successfully.", in.Path)
	return out, nil
}

// takeEdit takes the last edit of a file from those that are kept: nobody else goes back to it.
func (c *call) takeEdit(name string) (last edit, ok bool, err error) {
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	st, err := c.s.state(c)
	if err != nil {
		return last, false, err
	}
	es := st.edits[name]
	if len(es) == 0 {
		return last, false, nil
	}
	last = es[len(es)-1]
	if err := c.reserve(len(last.content)); err != nil {
		return last, false, err
	}
	if err := c.foresee(last.content, 1); err != nil {
		return last, false, err
	}
	c.s.shrinkEdits(st, len(last.content))
	if st.edits[name] = slices.Delete(es, len(es)-1, len(es)); len(es) == 1 {
		delete(st.edits, name)
	}
	return last, true, nil
}

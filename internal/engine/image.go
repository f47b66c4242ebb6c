package engine

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// An Image is an image as the engine describes it (docker image inspect).
type Image struct {
	ID      string `json:"Id"`
	Size    int64  // bytes
	Created time.Time
	Config  struct{ Labels map[string]string }
}

// ImagesScript prints the images that the options "$@" (--filter …) select, for ParseImages, and
// at most $most of them. $engine is the engine's program.
const ImagesScript = `
ids=$("$engine" images -q --no-trunc "$@" | sort -u | head -n "$most") || exit
[ -z "$ids" ] || "$engine" inspect --type image $ids || [ $? = 1 ]`

// ParseImages reads what ImagesScript printed.
func ParseImages(said string) (list []Image, err error) {
	if strings.TrimSpace(said) == "" {
		return nil, nil
	}
	err = json.Unmarshal([]byte(said), &list)
	return list, err
}

// maxImages bounds the images in one listing.
const maxImages = 2000

// HasLabels reports whether i has all labels with their values. Podman 4 also lists images that
// have only one of several requested labels, so a caller that filters by more than one must check again.
func (i Image) HasLabels(labels map[string]string) bool {
	for name, value := range labels {
		if have, ok := i.Config.Labels[name]; !ok || have != value {
			return false
		}
	}
	return true
}

// Images describes the images without a name that have all of labels; 2000 at most.
func (en *Engine) Images(ctx context.Context, labels map[string]string) ([]Image, error) {
	args := []string{en.Program, strconv.Itoa(maxImages), "--filter", "dangling=true"}
	for _, name := range slices.Sorted(maps.Keys(labels)) {
		args = append(args, "--filter", "label="+name+"="+labels[name])
	}
	out, err := en.Script(ctx, nil, nil, "engine=$1 most=$2\nshift 2"+ImagesScript, args...)
	if err != nil {
		return nil, err
	}
	list, err := ParseImages(out)
	if err != nil {
		err = en.unreadable(err, "its images")
	}
	return slices.DeleteFunc(list, func(i Image) bool { return !i.HasLabels(labels) }), err
}

// Import makes an image without a name of a root directory as a tar, which may be compressed, and returns its
// ID. entrypoint is the program that its containers run. The values of labels have neither spaces nor quotes.
func (en *Engine) Import(ctx context.Context, root io.Reader, labels map[string]string, entrypoint string) (id string, err error) {
	args := []string{en.Program}
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		if strings.ContainsAny(k+labels[k], " \t\n\"'\\$=") {
			return "", sandboxer.E(sandboxer.Internal, nil, "the label %q of an image contains a character that is not allowed", k)
		}
		args = append(args, "-c", "LABEL "+k+"="+labels[k]) // Podman takes one at a time
	}
	entry, err := json.Marshal([]string{entrypoint})
	if err != nil {
		return "", err
	}
	args = append(args, "-c", "ENTRYPOINT "+string(entry))
	out, err := en.Script(ctx, nil, root, `e=$1; shift; "$e" import "$@" -`, args...)
	if err != nil {
		return "", err
	}
	if f := strings.Fields(out); len(f) > 0 {
		id = f[len(f)-1]
	}
	return id, nil
}

package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/engine"
	"github.com/sand-boxer/sandboxer/internal/hosts"
	"github.com/sand-boxer/sandboxer/internal/program"
)

// agentFor finds the agent for an engine.
func (e *extension) agentFor(info engine.Info) (program.Program, error) {
	p, err := e.programs.Find(agentFile, info.Arch(), e.cfg.Agent)
	if err != nil {
		return p, sandboxer.E(sandboxer.Unsupported, err, "no sandbox can be made there: %s", sandboxer.Message(err)).WithHint("%s", sandboxer.HintOf(err))
	}
	return p, nil
}

// agentVolume names the volume with an agent.
func (e *extension) agentVolume(digest string) string {
	return e.agentVolumes() + digest[:12]
}

// fillerSuffix follows the volume's name in the name of a container that fills it.
const fillerSuffix = "-fill"

// agentVolumes is the common prefix of all these names of this extension.
func (e *extension) agentVolumes() string {
	sum := sha256.Sum256([]byte(e.env.Owner + "\x00" + e.env.Extension))
	return "sandboxer-agent-" + hex.EncodeToString(sum[:])[:12] + "-"
}

// volumesOn lists the volumes with agents on a host. An engine that is killed loses the labels of volumes that it made
// shortly before; those are known by their names, which also identify the owner.
func (e *extension) volumesOn(ctx context.Context, h *host) (ours []engine.APIVolume, err error) {
	all, err := h.api.ListVolumes(ctx, e.agentVolumes())
	for _, v := range all {
		if strings.HasPrefix(v.Name, e.agentVolumes()) && (len(v.Labels) == 0 || v.Labels[labelPrefix+hosts.LabelOwner] == e.env.Owner && v.Labels[labelPrefix+hosts.LabelExtension] == e.env.Extension) {
			ours = append(ours, v)
		}
	}
	return ours, err
}

// bringAgent puts the agent into its volume, unless it is there and complete. The caller holds the host's lock,
// shared, and image is any that the engine has. Nothing runs for it: a container that never starts has the volume,
// and accepts an archive.
func (e *extension) bringAgent(ctx context.Context, h *host, p program.Program, image string) (v engine.APIVolume, err error) {
	none := engine.APIVolume{}
	volume := e.agentVolume(p.Digest)
	labels := e.ours()
	labels[labelAgent] = p.Digest
	find := func() (whole bool, mark string, err error) {
		noted, err := e.env.Notes.Get(ctx, h.name)
		if err != nil {
			err = e.noteAgent(ctx, h, "")
		}
		if err != nil {
			return false, "", err
		}
		v, err = h.api.CreateVolume(ctx, volume, labels) // or finds it
		for k, want := range labels {
			if err == nil && len(v.Labels) > 0 && v.Labels[k] != want { // without labels it is ours: volumesOn
				err = sandboxer.E(sandboxer.Conflict, nil, "the engine %s has a volume %s that is somebody else's", h.name, volume).
					WithHint("if it is not needed, remove it: docker volume rm %s", volume)
			}
		}
		mark = p.Digest + " " + v.CreatedAt + " etc" // an operator may have removed the filled one; etcFiles came later
		return err == nil && string(noted.Value) == mark, mark, err
	}
	if whole, _, err := find(); whole || err != nil {
		return v, err
	}
	// One process of this installation brings it for all.
	unlock, err := e.env.Notes.Lock(ctx, "agent-"+h.name)
	if err != nil {
		return none, err
	}
	defer unlock()
	whole, mark, err := find()
	if whole || err != nil {
		return v, err
	}
	sandboxer.ReportProgress(ctx, sandboxer.Progress{Step: "bringing sandboxer-agent to " + h.name})
	id, err := e.create(ctx, h, volume+fillerSuffix, engine.ContainerConfig{Image: image, Env: []string{}, Entrypoint: []string{agentPath}, Cmd: []string{"help"}, Labels: labels,
		HostConfig: engine.HostConfig{NetworkMode: "none", Mounts: []engine.MountConfig{{Type: "volume", Source: volume, Target: agentDir, VolumeOptions: &engine.VolumeOptions{NoCopy: true}}}}})
	if err != nil {
		return none, err
	}
	defer func() {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
		defer cancel()
		err = errors.Join(err, h.api.RemoveContainer(undo, id))
	}()
	if err := h.startable(ctx, id, image, false); err != nil {
		return none, err
	}
	if !e.hasAgent(ctx, h, id, p.Digest) || !e.hasEtc(ctx, h, id) {
		data, err := os.ReadFile(p.Path)
		if err != nil {
			return none, sandboxer.E(sandboxer.Unavailable, err, "the program of the agent cannot be read")
		}
		if sum := sha256.Sum256(data); hex.EncodeToString(sum[:]) != p.Digest {
			return none, sandboxer.E(sandboxer.Unavailable, nil, "the program of the agent has changed just now").WithHint("try again")
		}
		var packed bytes.Buffer
		w := tar.NewWriter(&packed)
		err = putFile(w, agentFile, 0o755, data)
		for _, f := range etcFiles {
			err = errors.Join(err, putFile(w, etcDir+"/"+f.name, 0o644, []byte(f.text)))
		}
		if err := errors.Join(err, w.Close()); err != nil {
			return none, sandboxer.E(sandboxer.Internal, err, "the agent cannot be packed")
		}
		if err := h.api.PutArchive(ctx, id, agentDir, &packed); err != nil {
			return none, err
		}
		if !e.hasAgent(ctx, h, id, p.Digest) || !e.hasEtc(ctx, h, id) {
			return none, sandboxer.E(sandboxer.Unavailable, ctx.Err(), "the agent is not whole on the engine %s after it was brought there", h.name).WithHint("try again")
		}
	}
	return v, e.noteAgent(ctx, h, mark)
}

// noteAgent notes, under the host's name, that mark is the volume there with a complete agent. Without a mark the next
// sandbox checks whether the volume is complete. The note exists before any volume: so after a crash the next process
// knows that there may be something to remove.
func (e *extension) noteAgent(ctx context.Context, h *host, mark string) error {
	return e.env.Notes.Put(ctx, h.name, []byte(mark))
}

// removeFillers removes containers that fill volumes. The caller knows that no call fills one.
func (e *extension) removeFillers(ctx context.Context, h *host) error {
	labels := e.ours()
	labels[labelAgent] = ""
	list, err := h.api.ListContainers(ctx, labels)
	for _, c := range list {
		if d := c.Labels[labelAgent]; err == nil && len(d) >= 12 && c.Called(e.agentVolume(d)+fillerSuffix) {
			err = h.api.RemoveContainer(ctx, c.ID)
		}
	}
	return err
}

// hasAgent reports whether the agent with that digest is in the volume that the container has.
func (e *extension) hasAgent(ctx context.Context, h *host, id, digest string) bool {
	return e.hasFile(ctx, h, id, agentPath, 0o755, digest)
}

// hasEtc reports whether etcFiles are in the volume that the container has.
func (e *extension) hasEtc(ctx context.Context, h *host, id string) bool {
	for _, f := range etcFiles {
		sum := sha256.Sum256([]byte(f.text))
		if !e.hasFile(ctx, h, id, agentDir+"/"+etcDir+"/"+f.name, 0o644, hex.EncodeToString(sum[:])) {
			return false
		}
	}
	return true
}

func (e *extension) hasFile(ctx context.Context, h *host, id, path string, mode int64, digest string) bool {
	err := h.api.GetArchive(ctx, id, path, func(r io.Reader) error {
		tr := tar.NewReader(r)
		head, err := tr.Next()
		if err != nil {
			return err
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, tr); err != nil {
			return err
		}
		if head.Mode&0o777 != mode || hex.EncodeToString(sum.Sum(nil)) != digest {
			return errors.New("it is another file")
		}
		return nil
	})
	return err == nil
}

func putFile(w *tar.Writer, name string, mode int64, data []byte) error {
	err := w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode, Size: int64(len(data))})
	if err == nil {
		_, err = w.Write(data)
	}
	return err
}

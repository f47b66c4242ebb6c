package cli

import (
	"context"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/sand-boxer/sandboxer/api"
)

func newCmdConfig(f *factory) *cobra.Command {
	return newGroup("config", "Settings: show their values and origins", nil, newCmdConfigShow(f), newCmdConfigPath(f))
}

type configShowOptions struct {
	f      *factory
	origin bool
}

func newCmdConfigShow(f *factory) *cobra.Command {
	o := &configShowOptions{f: f}
	c := &cobra.Command{
		Use: "show", Short: "Show the settings in effect", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return configShowRun(cmd.Context(), o)
		},
	}
	c.Flags().BoolVar(&o.origin, "origin", false, "also show the origin of each: flag, environment, file or built-in")
	return c
}

func configShowRun(_ context.Context, o *configShowOptions) error {
	s, err := o.f.settings()
	if err != nil {
		return err
	}
	l := &api.List[setting]{SchemaVersion: api.SchemaVersion, Items: s.all}
	if o.f.getenv("SANDBOXER_API_KEY") != "" {
		l.Items = append(l.Items, setting{"api_key", "[redacted]", "SANDBOXER_API_KEY"})
	}
	v := view[setting]{
		cols: []string{"SETTING", "VALUE", "ORIGIN"},
		row:  func(x setting) []string { return []string{x.Key, x.Value, x.Origin} },
		name: func(x setting) string { return x.Key },
	}
	if !o.origin && o.f.format() != "wide" {
		v.cols = v.cols[:2]
	}
	return printList(o.f, l, v)
}

func newCmdConfigPath(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "path", Short: "Show the directories of settings, profiles and extensions", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return configPathRun(f)
		},
	}
}

func configPathRun(f *factory) error {
	s, err := f.settings()
	if err != nil {
		return err
	}
	type dir struct {
		Layer string `json:"layer"`
		Path  string `json:"path"`
	}
	l := &api.List[dir]{SchemaVersion: api.SchemaVersion, Items: []dir{}}
	for _, d := range s.configDirs {
		l.Items = append(l.Items, dir(d))
	}
	if format := f.format(); format == "table" {
		for _, d := range l.Items {
			fmt.Fprintln(f.io.out, d.Path)
		}
		return nil
	}
	return printList(f, l, view[dir]{
		cols: []string{"LAYER", "PATH"},
		row:  func(d dir) []string { return []string{d.Layer, d.Path} },
		name: func(d dir) string { return d.Path },
	})
}

type versionInfo struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

func newCmdVersion(f *factory) *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show the version of this program", Args: wants(0, 0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return versionRun(f)
		},
	}
}

func versionRun(f *factory) error {
	v := versionInfo{version(), runtime.Version(), runtime.GOOS, runtime.GOARCH}
	if format := f.format(); format != "table" && format != "wide" && format != "name" {
		return printData(f.io.out, format, v)
	}
	_, err := fmt.Fprintln(f.io.out, v)
	return err
}

func (v versionInfo) String() string {
	return fmt.Sprintf("sandboxer %s (%s %s/%s)", v.Version, v.Go, v.OS, v.Arch)
}

package cli

import (
	"bufio"
	"bytes"
	"context"
	"net/url"
	"os"
	"strings"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/checkpoint"
	"github.com/sand-boxer/sandboxer/internal/checkpoint/s3"
)

// defaultS3 is where buckets are by default.
const defaultS3 = "https://s3.amazonaws.com"

// checkSnapshotStore takes s3://bucket or s3://bucket/prefix.
func checkSnapshotStore(v string) error {
	u, err := url.Parse(v)
	if err != nil || u.Scheme != "s3" || u.Host == "" || u.Port() != "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return invalid("%q is not a store for snapshots", v).WithHint("write s3://bucket or s3://bucket/prefix, or nothing for the data directory")
	}
	return nil
}

// checkS3Endpoint takes the URL of an object store.
func checkS3Endpoint(v string) error {
	u, err := url.Parse(v)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" {
		return invalid("%q is not the address of an object store", v).WithHint("write https://host or https://host:port; credentials go into s3_credentials")
	}
	return nil
}

// snapshotStore returns the bucket that portable snapshots are kept in, nil for the
// data directory.
func (f *factory) snapshotStore() (*s3.Config, error) {
	s, err := f.settings()
	if err != nil {
		return nil, err
	}
	place := s.get("snapshot_store")
	if place == "" {
		return nil, nil
	}
	u, err := url.Parse(place)
	if err != nil {
		return nil, sandboxer.E(sandboxer.Invalid, err, "snapshot_store is no URL")
	}
	c := &s3.Config{Endpoint: s.get("s3_endpoint"), Region: s.get("s3_region"), Bucket: u.Host, Prefix: strings.Trim(u.Path, "/")}
	if c.Endpoint == "" {
		c.Endpoint = defaultS3
	}
	if file := s.get("s3_credentials"); file != "" {
		err = readS3Credentials(file, c)
	} else {
		c.AccessKey = f.getenv("AWS_ACCESS_KEY_ID")
		c.SecretKey, c.Token = sandboxer.Secret(f.getenv("AWS_SECRET_ACCESS_KEY")), sandboxer.Secret(f.getenv("AWS_SESSION_TOKEN"))
	}
	if err == nil && (c.AccessKey == "" || c.SecretKey == "") {
		err = invalid("snapshots are kept in %s, and there are no credentials for it", place).
			WithHint("set s3_credentials to a file, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the server's environment")
	}
	return c, err
}

// readS3Credentials reads the section [default] of a file in the form that other
// programs keep S3 credentials in.
func readS3Credentials(name string, c *s3.Config) error {
	st, err := os.Stat(name)
	if err != nil {
		return unreadable(err, "the credentials in %s cannot be read", name)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return invalid("the credentials in %s can be read by others", name).WithHint("chmod 600 %s", name)
	}
	data, err := os.ReadFile(name)
	if err != nil {
		return unreadable(err, "the credentials in %s cannot be read", name)
	}
	section := "default"
	for sc := bufio.NewScanner(bytes.NewReader(data)); sc.Scan(); {
		line := strings.TrimSpace(sc.Text())
		if strings.HasPrefix(line, "[") {
			section = strings.TrimSpace(strings.Trim(line, "[]"))
			continue
		}
		k, v, ok := strings.Cut(line, "=")
		if !ok || section != "default" || strings.HasPrefix(line, "#") || strings.HasPrefix(line, ";") {
			continue
		}
		v = strings.TrimSpace(v)
		switch strings.TrimSpace(k) {
		case "aws_access_key_id":
			c.AccessKey = v
		case "aws_secret_access_key":
			c.SecretKey = sandboxer.Secret(v)
		case "aws_session_token":
			c.Token = sandboxer.Secret(v)
		}
	}
	return nil
}

// openBucket opens the place of this installation's snapshots in the bucket: below a
// prefix of its own, so that no other installation's housekeeping touches them.
func openBucket(ctx context.Context, c s3.Config, owner string) (checkpoint.Blobs, error) {
	c.Prefix = strings.TrimPrefix(c.Prefix+"/"+owner, "/")
	return s3.Open(ctx, c)
}

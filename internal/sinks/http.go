package sinks

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/sand-boxer/sandboxer"
	"github.com/sand-boxer/sandboxer/internal/capture"
)

const (
	answerTime = 15 * time.Second // for one answer
	maxAnswer  = 64 << 10         // of an answer that is read, in bytes
	maxReason  = 300              // of it that is kept
	maxAfter   = time.Hour        // of what it says when to try again
)

// An endpoint takes batches over HTTP.
type endpoint struct {
	sink   sandboxer.Sink
	secret func(ctx context.Context, ref sandboxer.SecretRef) (sandboxer.Secret, error)
	client http.Client
}

func newEndpoint(sink sandboxer.Sink, secret func(context.Context, sandboxer.SecretRef) (sandboxer.Secret, error)) *endpoint {
	return &endpoint{sink: sink, secret: secret, client: http.Client{
		Transport:     &http.Transport{MaxResponseHeaderBytes: maxAnswer, MaxIdleConns: 1, IdleConnTimeout: time.Minute, TLSHandshakeTimeout: answerTime},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Timeout:       answerTime,
	}}
}

func (e *endpoint) close() { e.client.CloseIdleConnections() }

// deliver posts batch, signed with every key. Its ID depends on the content alone, so a repetition has the same one.
func (e *endpoint) deliver(ctx context.Context, batch []item) error {
	body := append(append([]byte("["), joined(batch, ",")...), ']')
	sum := sha256.Sum256(body)
	id, at := "msg_"+hex.EncodeToString(sum[:16]), strconv.FormatInt(time.Now().Unix(), 10)
	var signatures []string
	for _, name := range e.sink.Keys {
		ref := sandboxer.SecretRef{Name: name}
		value, err := e.secret(ctx, ref)
		if err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "the %s, which signs, cannot be read: %s", ref, sandboxer.Message(err))
		}
		signature, err := Sign(value, id, at, body)
		if err != nil {
			return sandboxer.E(sandboxer.Unavailable, err, "the %s cannot sign: %s", ref, sandboxer.Message(err))
		}
		signatures = append(signatures, signature)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.sink.URL, bytes.NewReader(body))
	if err != nil {
		return sandboxer.E(sandboxer.Unavailable, err, "its URL cannot be used")
	}
	req.Header.Set("Content-Type", "application/cloudevents-batch+json; charset=utf-8")
	req.Header.Set("User-Agent", "sandboxer")
	req.Header.Set("webhook-id", id)
	req.Header.Set("webhook-timestamp", at)
	req.Header.Set("webhook-signature", strings.Join(signatures, " "))
	res, err := e.client.Do(req)
	if err != nil {
		why := ": " + capture.Text(err.Error(), maxReason)
		if u := new(url.Error); errors.As(err, &u) && u.Timeout() {
			why = " within " + e.client.Timeout.String()
		} else if u.Err != nil { // u repeats the URL
			why = ": " + capture.Text(u.Err.Error(), maxReason)
		}
		return sandboxer.E(sandboxer.Unavailable, err, "it does not answer%s", why)
	}
	defer res.Body.Close()
	said, err := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	if err != nil && res.StatusCode/100 == 2 {
		return nil // it took the batch; the rest of its answer says nothing
	}
	return verdict(res, said)
}

// verdict says what an answer means.
func verdict(res *http.Response, said []byte) error {
	kind := sandboxer.Unavailable
	switch code := res.StatusCode; {
	case code/100 == 2:
		return nil
	case code == http.StatusBadRequest, code == http.StatusRequestEntityTooLarge, code == http.StatusUnprocessableEntity:
		kind = sandboxer.Invalid
	case code == http.StatusGone:
		kind = sandboxer.NotFound
	}
	text := fmt.Sprintf("it answers %d", res.StatusCode)
	if res.StatusCode/100 == 3 {
		text += ", and redirects are not followed"
	}
	if why := capture.Text(string(said), maxReason); why != "" {
		text += ": " + why
	}
	e := sandboxer.E(kind, nil, "%s", text)
	if kind == sandboxer.Unavailable {
		after, _ := strconv.Atoi(res.Header.Get("Retry-After")) // a date, which is rare, is not read
		e.RetryAfter = time.Duration(min(max(after, 0), int(maxAfter/time.Second))) * time.Second
	}
	return e
}

// Sign returns the signature of Standard Webhooks, version 1, for a request with that ID, timestamp and body. Kind:
// Invalid for a key that is none.
func Sign(key sandboxer.Secret, id, timestamp string, body []byte) (string, error) {
	text, ok := strings.CutPrefix(strings.TrimSpace(key.Reveal()), "whsec_")
	raw, err := base64.StdEncoding.DecodeString(text)
	if !ok || err != nil || len(raw) < 24 || len(raw) > 64 {
		return "", sandboxer.E(sandboxer.Invalid, nil, "it is not a signing key: want whsec_ and 24 to 64 bytes in base64").
			WithHint("make one: echo whsec_$(openssl rand -base64 32)")
	}
	mac := hmac.New(sha256.New, raw)
	mac.Write([]byte(id + "." + timestamp + "."))
	mac.Write(body)
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil)), nil
}

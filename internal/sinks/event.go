package sinks

import (
	"bytes"
	"cmp"
	"encoding/json"
	"time"

	"github.com/sand-boxer/sandboxer"
)

// eventType is the CloudEvents type of all events. Fields are only added to it; anything else is another type.
const eventType = "dev.sandboxer.usage.v1"

// event is a CloudEvents 1.0 event about one usage row.
type event struct {
	SpecVersion string    `json:"specversion"`
	ID          string    `json:"id"`
	Source      string    `json:"source"`
	Type        string    `json:"type"`
	Subject     string    `json:"subject"`
	Time        time.Time `json:"time"`
	ContentType string    `json:"datacontenttype"`
	Data        any       `json:"data"`
}

// An item is a usage row as an event.
type item struct {
	seq  int64
	id   string
	data []byte // JSON, one line
}

// items returns as many of rows as one batch holds, at least one.
func (s *Sinks) items(rows []sandboxer.UsageRow) (batch []item, err error) {
	size := 2
	for _, r := range rows {
		data, err := json.Marshal(event{SpecVersion: "1.0", ID: r.Key, Source: "urn:sandboxer:" + s.opts.Owner, Type: eventType,
			Subject: r.Tenant + "/" + cmp.Or(r.ShownID, r.SandboxID), Time: r.At, ContentType: "application/json", Data: s.opts.Data(r)})
		if err != nil {
			return nil, err
		}
		if size += len(data) + 1; size > maxBytes && len(batch) > 0 {
			break
		}
		batch = append(batch, item{r.Seq, r.Key, data})
	}
	return batch, nil
}

// joined returns the events of batch with sep between them.
func joined(batch []item, sep string) []byte {
	all := make([][]byte, len(batch))
	for i, it := range batch {
		all[i] = it.data
	}
	return bytes.Join(all, []byte(sep))
}

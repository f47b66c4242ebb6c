package agent

import "sync"

// Clients keeps the clients of the agents in an adapter's sandboxes by name, so that calls share
// connections. It calls nothing but the Dial of its clients. The zero value is empty and ready. Its
// methods are safe for concurrent use and do not block.
type Clients struct {
	mu     sync.Mutex
	kept   map[string]keptClient
	closed bool
}

type keptClient struct {
	*Client
	object string
}

// Get returns the client with this name. If there is none, or if its object is another one, such as a
// former container of the sandbox, Get makes a client with o, keeps it, and closes the former one. After
// Close it makes clients without keeping them. The caller closes none of them: Drop and Close do.
func (cs *Clients) Get(name, object string, o ClientOptions) *Client {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if k, ok := cs.kept[name]; ok && k.object == object {
		return k.Client
	}
	cs.drop(name)
	c := NewClient(o)
	if cs.closed {
		c.Close()
		return c
	}
	if cs.kept == nil {
		cs.kept = map[string]keptClient{}
	}
	cs.kept[name] = keptClient{c, object}
	return c
}

// Kept returns the client with this name, or nil if there is none.
func (cs *Clients) Kept(name string) *Client {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.kept[name].Client
}

// Drop closes the client with this name, if there is one: its idle connections end, its running calls
// continue, and the next Get makes another one.
func (cs *Clients) Drop(name string) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.drop(name)
}

func (cs *Clients) drop(name string) {
	if k, ok := cs.kept[name]; ok {
		k.Close()
		delete(cs.kept, name)
	}
}

// Close drops all clients, for good. Its error is nil.
func (cs *Clients) Close() error {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.closed = true
	for name := range cs.kept {
		cs.drop(name)
	}
	return nil
}

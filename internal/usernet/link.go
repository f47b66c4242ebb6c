//go:build linux

package usernet

import (
	"io"
	"net/netip"
	"sync"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

func addr(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

// linkEndpoint is a link over a message-preserving connection. It exists because
// gVisor's own descriptor-based endpoint makes descriptors that leak into children.
type linkEndpoint struct {
	conn  io.ReadWriteCloser // a packet each
	sums  bool               // the other side looks at checksums
	mtu   uint32
	queue chan *stack.PacketBuffer // bounded: what does not fit is dropped, and TCP slows down
	done  chan struct{}
	once  sync.Once
	wg    sync.WaitGroup

	mu   sync.RWMutex
	disp stack.NetworkDispatcher
	mac  tcpip.LinkAddress
}

func newLinkEndpoint(c io.ReadWriteCloser, mtu uint32, mac tcpip.LinkAddress, sums bool) *linkEndpoint {
	return &linkEndpoint{conn: c, sums: sums, mtu: mtu, mac: mac, queue: make(chan *stack.PacketBuffer, 1024), done: make(chan struct{})}
}

func (l *linkEndpoint) MTU() uint32 { return l.mtu }

func (l *linkEndpoint) SetMTU(uint32) {}

func (l *linkEndpoint) MaxHeaderLength() uint16 { return 0 }

func (l *linkEndpoint) LinkAddress() tcpip.LinkAddress { return l.mac }

func (l *linkEndpoint) SetLinkAddress(tcpip.LinkAddress) {}

func (l *linkEndpoint) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareEther }

func (l *linkEndpoint) AddHeader(*stack.PacketBuffer) {}

func (l *linkEndpoint) ParseHeader(*stack.PacketBuffer) bool { return true }

func (l *linkEndpoint) SetOnCloseAction(func()) {}

func (l *linkEndpoint) Wait() { l.wg.Wait() }

func (l *linkEndpoint) Capabilities() stack.LinkEndpointCapabilities {
	if l.sums {
		return stack.CapabilityRXChecksumOffload
	}
	return stack.CapabilityRXChecksumOffload | stack.CapabilityTXChecksumOffload
}

func (l *linkEndpoint) IsAttached() bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.disp != nil
}

func (l *linkEndpoint) Attach(d stack.NetworkDispatcher) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.disp = d
}

// start lets packets through, both ways.
func (l *linkEndpoint) start() {
	l.wg.Go(l.read)
	l.wg.Go(l.write)
}

func (l *linkEndpoint) Close() {
	l.once.Do(func() {
		close(l.done)
		l.conn.Close()
	})
}

func (l *linkEndpoint) WritePackets(pkts stack.PacketBufferList) (int, tcpip.Error) {
	n := 0
	for _, p := range pkts.AsSlice() {
		p.IncRef()
		select {
		case l.queue <- p:
			n++
		default:
			p.DecRef()
			return n, &tcpip.ErrNoBufferSpace{}
		}
	}
	return n, nil
}

func (l *linkEndpoint) write() {
	buf := make([]byte, 0, l.mtu)
	for {
		select {
		case <-l.done:
			for {
				select {
				case p := <-l.queue:
					p.DecRef()
				default:
					return
				}
			}
		case p := <-l.queue:
			buf = buf[:0]
			for _, s := range p.AsSlices() {
				buf = append(buf, s...)
			}
			p.DecRef()
			_, _ = l.conn.Write(buf) // a failure is not reported: the sandbox is gone, or this is no longer its other end
		}
	}
}

func (l *linkEndpoint) read() {
	buf := make([]byte, l.mtu)
	for {
		n, err := l.conn.Read(buf)
		if err != nil { // closed, or another process has taken the link
			return
		}
		if n < header.EthernetMinimumSize {
			continue // a datagram may be empty
		}
		pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(buffer.NewViewWithData(buf[:n]))})
		pkt.RXChecksumValidated = true
		l.mu.RLock()
		d := l.disp
		l.mu.RUnlock()
		if d != nil {
			d.DeliverNetworkPacket(0, pkt)
		}
		pkt.DecRef()
	}
}

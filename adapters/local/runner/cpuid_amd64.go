//go:build linux

package runner

import (
	"sync"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/cpuid"
)

//go:linkname cpuidOnce gvisor.dev/gvisor/pkg/cpuid.initOnce
var cpuidOnce sync.Once

//go:linkname hostFeatures gvisor.dev/gvisor/pkg/cpuid.hostFeatureSet
var hostFeatures cpuid.FeatureSet

//go:linkname readMaxCPUFreq gvisor.dev/gvisor/pkg/cpuid.readMaxCPUFreq
func readMaxCPUFreq()

//go:linkname initHWCap gvisor.dev/gvisor/pkg/cpuid.initHWCap
func initHWCap()

// askProcessorOnce has the sandbox's kernel learn what the processor can do with a quarter
// of the questions. gVisor asks for every feature anew, three hundred times at a start;
// on a virtual machine each is answered by its host, which takes a fiftieth of the
// processor time of a short life.
func askProcessorOnce() {
	cpuidOnce.Do(func() {
		hostFeatures = cpuid.FeatureSet{Function: remembered{}}.Fixed()
		readMaxCPUFreq()
		initHWCap()
	})
}

// remembered are the processor's answers to what it was asked.
type remembered map[cpuid.In]cpuid.Out

func (r remembered) Query(in cpuid.In) cpuid.Out {
	out, ok := r[in]
	if !ok {
		out = (&cpuid.Native{}).Query(in)
		r[in] = out
	}
	return out
}

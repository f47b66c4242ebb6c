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

// askProcessorOnce lets the sandbox's kernel learn the processor's features with a quarter
// of the queries. gVisor repeats the query for every feature, three hundred times at a
// start; on a virtual machine its host answers each, which takes a fiftieth of the
// processor time of a short life.
func askProcessorOnce() {
	cpuidOnce.Do(func() {
		hostFeatures = cpuid.FeatureSet{Function: remembered{}}.Fixed()
		readMaxCPUFreq()
		initHWCap()
	})
}

// remembered are the processor's answers by query.
type remembered map[cpuid.In]cpuid.Out

func (r remembered) Query(in cpuid.In) cpuid.Out {
	out, ok := r[in]
	if !ok {
		out = (&cpuid.Native{}).Query(in)
		r[in] = out
	}
	return out
}

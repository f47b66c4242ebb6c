//go:build linux

package runner

import (
	"reflect"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/cpuid"
)

// TestAskProcessorOnce compares what gVisor learns about the processor this way with what
// it learns alone.
func TestAskProcessorOnce(t *testing.T) {
	// An answer shows which processor gave it. The thread ends with the test.
	runtime.LockOSThread()
	var one unix.CPUSet
	one.Set(0)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Skipf("this test may not choose a processor: %v", err)
	}
	want := cpuid.FeatureSet{Function: &cpuid.Native{}}.Fixed()
	askProcessorOnce()
	cpuid.Initialize() // nothing is left to do
	got := cpuid.HostFeatureSet()
	if !reflect.DeepEqual(got.Function, want.Function) {
		t.Errorf("the processor is %v, and %v when asked each time", got.Function, want.Function)
	}
	r := remembered{}
	if a, b := (cpuid.FeatureSet{Function: r}.ToStatic()), (cpuid.FeatureSet{Function: &cpuid.Native{}}.ToStatic()); !reflect.DeepEqual(a, b) || len(r) == 0 {
		t.Errorf("%v remembered, %v asked each time", a, b)
	}
}

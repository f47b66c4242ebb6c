//go:build !linux

package extensiontest

import "os"

// exchange swaps two names.
func exchange(a, b string) error {
	for _, r := range [][2]string{{a, a + ".x"}, {b, a}, {a + ".x", b}} {
		if err := os.Rename(r[0], r[1]); err != nil {
			return err
		}
	}
	return nil
}

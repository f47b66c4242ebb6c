// Package measure takes samples and computes their statistics: the one harness of `sandboxer
// bench` and of the programs in bench/.
//
// [Plan.Interleave] lets arms, the things to compare, take turns, so that other work of
// the machine affects all of them alike; [Load.Run] does many things at the same time.
// [Describe], [Trim], [Spread] and [Outliers] describe one series of samples, and [RatioOf]
// compares the medians of two, with how sure that is.
//
// Only finite numbers are samples: others are counted apart, and no figure is ever
// infinite or not a number.
package measure
